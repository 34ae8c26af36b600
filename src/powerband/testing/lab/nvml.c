/* A stand-in for libnvidia-ml.so.1 on a host of the lab, for the real Python binding.

   The folder in POWERBAND_LAB has nvml.txt with one GPU a line:
     uuid|name|total bytes|capability major|minor|PCI bus id|island|MIG instances|fault
   and devices/<uuid> with one claim a line: pid bytes. Claims of ended processes do not count.
   Faults: lost (no query is answered), memory, name, uuid, capability (that query fails). driver.txt holds the driver's
   version; "broken" makes the initialization fail. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define MOST 64
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, LOST = 15, UNKNOWN = 999 };
typedef struct { char uuid[96], name[96], bus[32], fault[32]; unsigned long long total; int major, minor, island, mig, parent; } gpu_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { char busIdLegacy[16]; unsigned int domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } pci_t;
static gpu_t gpus[MOST], instances[MOST];
static int count, instance_count;

static FILE *open_file(const char *name, const char *mode) {
  char path[4096];
  const char *folder = getenv("POWERBAND_LAB");
  if (!folder) return NULL;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  return fopen(path, mode);
}

static int load(void) {
  char line[1024];
  FILE *file = open_file("nvml.txt", "r");
  count = instance_count = 0;
  if (!file) return DRIVER_NOT_LOADED;
  while (fgets(line, sizeof line, file) && count < MOST) {
    gpu_t *one = &gpus[count];
    memset(one, 0, sizeof *one);
    sscanf(line, "%95[^|]|%95[^|]|%llu|%d|%d|%31[^|]|%d|%d|%31[^\n]", one->uuid, one->name, &one->total, &one->major,
           &one->minor, one->bus, &one->island, &one->mig, one->fault);
    for (int number = 0; number < one->mig && instance_count < MOST; number++) {
      gpu_t *part = &instances[instance_count++];
      *part = *one;
      part->total = one->total / one->mig, part->mig = 0, part->parent = count + 1;
      snprintf(part->uuid, sizeof part->uuid, "MIG-%.80s-%d", one->uuid, number);
    }
    count++;
  }
  fclose(file);
  return OK;
}

static int answers(const gpu_t *one, const char *fact) {
  return !strcmp(one->fault, "lost") ? LOST : !strcmp(one->fault, fact) ? UNKNOWN : OK;
}

static unsigned long long used(const gpu_t *one) {
  char name[128];
  long pid;
  unsigned long long bytes, total = 0;
  snprintf(name, sizeof name, "devices/%s", one->uuid);
  FILE *file = open_file(name, "r");
  if (!file) return 0;
  while (fscanf(file, "%ld %llu", &pid, &bytes) == 2)
    if (!kill(pid, 0) || errno == EPERM) total += bytes;
  fclose(file);
  return total;
}

int nvmlInit_v2(void) {
  char text[80] = "";
  FILE *file = open_file("driver.txt", "r");
  if (!file) return DRIVER_NOT_LOADED;
  if (!fgets(text, sizeof text, file)) text[0] = 0;
  fclose(file);
  return strncmp(text, "broken", 6) ? load() : DRIVER_NOT_LOADED;
}
int nvmlInitWithFlags(unsigned int flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
  FILE *file = open_file("driver.txt", "r");
  if (!file || !fgets(text, length, file)) return UNKNOWN;
  text[strcspn(text, "\n")] = 0;
  fclose(file);
  return OK;
}
int nvmlDeviceGetCount_v2(unsigned int *found) { *found = count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
  if ((int)index >= count) return INVALID;
  *device = &gpus[index];
  return answers(&gpus[index], "handle");
}
int nvmlDeviceGetName(gpu_t *one, char *text, unsigned int length) {
  snprintf(text, length, one->parent ? "%s MIG" : "%s", one->name);
  return answers(one, "name");
}
int nvmlDeviceGetUUID(gpu_t *one, char *text, unsigned int length) {
  snprintf(text, length, "%s", one->uuid);
  return answers(one, "uuid");
}
int nvmlDeviceGetMemoryInfo(gpu_t *one, memory_t *memory) {
  memory->total = one->total, memory->used = used(one);
  memory->free = memory->total > memory->used ? memory->total - memory->used : 0;
  return answers(one, "memory");
}
int nvmlDeviceGetMemoryInfo_v2(gpu_t *one, memory_v2_t *memory) {
  memory_t plain;
  int code = nvmlDeviceGetMemoryInfo(one, &plain);
  memory->total = plain.total, memory->free = plain.free, memory->used = plain.used, memory->reserved = 0;
  return code;
}
int nvmlDeviceGetCudaComputeCapability(gpu_t *one, int *major, int *minor) {
  *major = one->major, *minor = one->minor;
  return answers(one, "capability");
}
int nvmlDeviceGetPciInfo_v3(gpu_t *one, pci_t *pci) {
  memset(pci, 0, sizeof *pci);
  snprintf(pci->busId, sizeof pci->busId, "%s", one->bus);
  return answers(one, "bus");
}
int nvmlDeviceGetP2PStatus(gpu_t *one, gpu_t *other, int kind, int *status) {
  *status = one->island == other->island ? 0 : 5;
  return answers(one, "links");
}
int nvmlDeviceGetMigMode(gpu_t *one, unsigned int *now, unsigned int *pending) {
  *now = *pending = one->mig > 0;
  return one->major >= 8 ? answers(one, "mig") : UNSUPPORTED;
}
int nvmlDeviceGetMaxMigDeviceCount(gpu_t *one, unsigned int *most) { *most = one->mig ? 7 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(gpu_t *one, unsigned int index, void **device) {
  int seen = 0;
  for (int number = 0; number < instance_count; number++)
    if (instances[number].parent == (int)(one - gpus) + 1 && seen++ == (int)index) {
      *device = &instances[number];
      return OK;
    }
  return NOT_FOUND;
}
const char *nvmlErrorString(int code) {
  return code == LOST ? "GPU is lost" : code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : code == NOT_FOUND ? "Not Found" : "Unknown Error";
}
