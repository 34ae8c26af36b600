{{/* Name and labels of an object: dict "values" .Values "name" NAME "component" COMPONENT */}}
{{- define "powerband.metadata" -}}
{{ dict "name" .name "labels" (dict "app.kubernetes.io/name" .values.name "app.kubernetes.io/component" .component "app.kubernetes.io/managed-by" "powerband") | toJson }}
{{- end }}
{{/* The labels by which Services, pools and policies select pods: dict "values" .Values "component" COMPONENT */}}
{{- define "powerband.selector" -}}
{{ dict "app.kubernetes.io/name" .values.name "app.kubernetes.io/component" .component | toJson }}
{{- end }}
{{/* What the Pod Security Standard "restricted" demands of a pod and of a container */}}
{{- define "powerband.podSecurity" -}}
{runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
{{- end }}
{{- define "powerband.containerSecurity" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: {{ .readOnly }}, capabilities: {drop: [ALL]}}
{{- end }}
{{/* Pods of Prometheus in any namespace: it is not known where it runs */}}
{{- define "powerband.prometheus" -}}
{namespaceSelector: {}, podSelector: {matchLabels: {app.kubernetes.io/name: prometheus}}}
{{- end }}
{{- define "powerband.gateway" -}}
{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ .Values.gateway.namespace | quote }}}}}
{{- end }}
