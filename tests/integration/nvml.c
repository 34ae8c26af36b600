/* A stand-in for libnvidia-ml.so.1 that answers like a machine with two H100: the real Python binding loads it.
   Names, driver and sizes are what such machines report (vllm-project/vllm#6746). */
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2_t;
static int devices[2] = {0, 1};
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned int length) { strncpy(text, "550.90.07", length); return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned int length) { strncpy(text, "NVIDIA H100 80GB HBM3", length); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned int length) {
  strncpy(text, *(int *)device ? "GPU-1" : "GPU-0", length); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
  memory->total = 81559ULL << 20; memory->used = *(int *)device ? 70000ULL << 20 : 1ULL << 20;
  memory->free = memory->total - memory->used; return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *memory) {
  memory_t plain; nvmlDeviceGetMemoryInfo(device, &plain);
  memory->total = plain.total; memory->free = plain.free; memory->used = plain.used; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
char *nvmlErrorString(int code) { return "an error"; }
