/* A library with NVML's symbols, steered by a file, so that the real pynvml can be tested without a GPU.

   CRATER_NVML_FILE names the file, which is read anew at every call. One thing a line:

       driver 570.86.15
       init 9                      what nvmlInit returns (0 is well; 9 driver not loaded; 4 no permission)
       gpu UUID BUS MEMORY_MIB USED_MIB USE_PERCENT CELSIUS MILLIWATT RETURN MIG NAME...
       slice PARENT_UUID UUID MEMORY_MIB NAME...
       link UUID UUID

   RETURN is what every question about that GPU answers with (0 is well; 15 it is lost). It is strict: a call that is not
   here fails when pynvml looks it up, and an argument that cannot be right ends the process. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define UNINITIALIZED 1
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define MAX 64

typedef struct {
    char uuid[96], bus[32], name[96], parent[96];
    unsigned long long memory_mib, used_mib;
    unsigned use, celsius, milliwatt;
    int answer, mig, slice;
} gpu;
typedef struct { char a[96], b[96]; } link_pair;
typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } pci_info;
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { unsigned gpu, memory; } utilization;

/* A handle is a pointer to one of these: it stays the same while the file changes. */
typedef struct { char uuid[96]; } handle;

static int initialized, gpus_n, links_n, init_answer, handles_n;
static char driver[80];
static gpu gpus[MAX];
static link_pair links[MAX];
static handle handles[MAX];

static void load(void) {
    const char *path = getenv("CRATER_NVML_FILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], a[96], b[96];
    gpus_n = links_n = init_answer = 0;
    strcpy(driver, "0.0");
    if (!file) { init_answer = 9; return; }
    while (fgets(line, sizeof line, file)) {
        gpu g;
        memset(&g, 0, sizeof g);
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "driver %79s", driver) == 1) continue;
        if (sscanf(line, "init %d", &init_answer) == 1) continue;
        if (sscanf(line, "link %95s %95s", a, b) == 2) {
            strcpy(links[links_n].a, a);
            strcpy(links[links_n++].b, b);
        } else if (sscanf(line, "gpu %95s %31s %llu %llu %u %u %u %d %d %95[^\n]", g.uuid, g.bus, &g.memory_mib, &g.used_mib, &g.use,
                          &g.celsius, &g.milliwatt, &g.answer, &g.mig, g.name) == 10) {
            gpus[gpus_n++] = g;
        } else if (sscanf(line, "slice %95s %95s %llu %95[^\n]", g.parent, g.uuid, &g.memory_mib, g.name) == 4) {
            g.slice = 1;
            gpus[gpus_n++] = g;
        } else if (line[0]) {
            fprintf(stderr, "nvml stand-in: cannot read the line: %s\n", line);
            abort();
        }
    }
    fclose(file);
}

static void *handle_of(const char *uuid) {
    for (int i = 0; i < handles_n; i++)
        if (!strcmp(handles[i].uuid, uuid)) return &handles[i];
    strcpy(handles[handles_n].uuid, uuid);
    return &handles[handles_n++];
}

static int find(void *device, gpu **found) {
    if (!initialized) return UNINITIALIZED;
    if ((handle *)device < handles || (handle *)device >= handles + handles_n) abort();
    load();
    for (int i = 0; i < gpus_n; i++)
        if (!strcmp(gpus[i].uuid, ((handle *)device)->uuid)) {
            *found = &gpus[i];
            return gpus[i].answer;
        }
    return 15; /* It was there and is no more: lost. */
}

static int text(const char *from, char *to, unsigned size) {
    if (strlen(from) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    if (flags) abort();
    load();
    if (!init_answer) initialized = 1;
    return init_answer;
}

int nvmlShutdown(void) {
    if (!initialized) return UNINITIALIZED;
    initialized = 0;
    return OK;
}

const char *nvmlErrorString(int code) {
    static char shown[40];
    switch (code) {
        case 4: return "Insufficient Permissions";
        case 9: return "Driver Not Loaded";
        case 15: return "GPU is lost";
        default: snprintf(shown, sizeof shown, "Error %d", code); return shown;
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    if (!initialized) return UNINITIALIZED;
    load();
    return text(driver, version, size);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!initialized) return UNINITIALIZED;
    load();
    *count = 0;
    for (int i = 0; i < gpus_n; i++) *count += !gpus[i].slice;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (!initialized) return UNINITIALIZED;
    load();
    for (int i = 0; i < gpus_n; i++)
        if (!gpus[i].slice && index-- == 0) {
            *device = handle_of(gpus[i].uuid);
            return OK;
        }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (!initialized) return UNINITIALIZED;
    load();
    for (int i = 0; i < gpus_n; i++)
        if (!strcmp(gpus[i].uuid, uuid)) {
            *device = handle_of(uuid);
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetPciInfo_v3(void *device, pci_info *info) {
    gpu *g;
    int answer = find(device, &g);
    if (answer) return answer;
    memset(info, 0, sizeof *info);
    return text(g->bus, info->busId, sizeof info->busId);
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    gpu *g;
    int answer = find(device, &g);
    return answer ? answer : text(g->uuid, uuid, size);
}

int nvmlDeviceGetName(void *device, char *name, unsigned size) {
    gpu *g;
    int answer = find(device, &g);
    return answer ? answer : text(g->name, name, size);
}

/* In the order of the file, as a driver numbers cards in the order in which it finds them. */
int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) {
    gpu *g;
    int answer = find(device, &g);
    if (answer) return answer;
    if (g->slice) return NOT_SUPPORTED;
    *minor = 0;
    for (int i = 0; &gpus[i] != g; i++) *minor += !gpus[i].slice;
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_info *info) {
    gpu *g;
    int answer = find(device, &g);
    if (answer) return answer;
    info->total = g->memory_mib << 20;
    info->used = g->used_mib << 20;
    info->free = info->total - info->used;
    return OK;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    gpu *g;
    int answer = find(device, &g);
    if (answer) return answer;
    if (g->mig < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)g->mig;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    gpu *g;
    int answer = find(device, &g);
    *count = 7;
    return answer;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **slice) {
    gpu *g;
    int answer = find(device, &g);
    if (answer) return answer;
    for (int i = 0; i < gpus_n; i++)
        if (gpus[i].slice && !strcmp(gpus[i].parent, g->uuid) && index-- == 0) {
            *slice = handle_of(gpus[i].uuid);
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetP2PStatus(void *one, void *other, int index, int *status) {
    gpu *a, *b;
    int answer = find(one, &a);
    if (answer) return answer;
    if (index != 2) abort();
    char first[96];
    strcpy(first, a->uuid);
    answer = find(other, &b);
    if (answer) return answer;
    *status = 5; /* Unknown, until a line says that there is a link. */
    for (int i = 0; i < links_n; i++)
        if ((!strcmp(links[i].a, first) && !strcmp(links[i].b, b->uuid)) || (!strcmp(links[i].b, first) && !strcmp(links[i].a, b->uuid)))
            *status = 0;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *device, utilization *use) {
    gpu *g;
    int answer = find(device, &g);
    if (answer) return answer;
    if (g->slice) return NOT_SUPPORTED;
    use->gpu = g->use;
    use->memory = 0;
    return OK;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    gpu *g;
    int answer = find(device, &g);
    if (answer) return answer;
    if (sensor) abort();
    *celsius = g->celsius;
    return OK;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatt) {
    gpu *g;
    int answer = find(device, &g);
    if (answer) return answer;
    if (!g->milliwatt) return NOT_SUPPORTED;
    *milliwatt = g->milliwatt;
    return OK;
}
