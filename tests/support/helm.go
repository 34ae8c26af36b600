// Renders the templates of a chart with Go's own template engine and the few functions of Helm that our chart uses.
// usage: helm TEMPLATES_FOLDER < values.json > manifests.yaml
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"text/template"
)

func main() {
	var values map[string]interface{}
	check(json.NewDecoder(os.Stdin).Decode(&values))
	all := template.New("chart").Option("missingkey=error")
	all.Funcs(template.FuncMap{
		"toJson": func(value interface{}) (string, error) {
			text, err := json.Marshal(value)
			return string(text), err
		},
		"quote": func(value interface{}) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"dict": func(pairs ...interface{}) map[string]interface{} {
			found := map[string]interface{}{}
			for i := 0; i+1 < len(pairs); i += 2 {
				found[pairs[i].(string)] = pairs[i+1]
			}
			return found
		},
		"include": func(name string, data interface{}) (string, error) {
			var out bytes.Buffer
			err := all.ExecuteTemplate(&out, name, data)
			return out.String(), err
		},
	})
	files, err := filepath.Glob(filepath.Join(os.Args[1], "*"))
	check(err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		check(err)
		_, err = all.New(filepath.Base(file)).Parse(string(text))
		check(err)
	}
	for _, file := range files {
		if filepath.Ext(file) != ".tpl" {
			fmt.Println("---")
			check(all.ExecuteTemplate(os.Stdout, filepath.Base(file), map[string]interface{}{"Values": values}))
			fmt.Println()
		}
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
