/* A library with NVML's symbols, steered by a file, so that the real pynvml can be tested without a GPU.

   CRATER_NVML_FILE names the file, which is read anew at every call. One thing a line; README.md beside this file has the list.
   It is strict: a call that is not here fails when pynvml looks it up, an argument that cannot be right ends the process, and a
   struct of a version that is not known here is refused as the driver refuses it. Calls may come from several threads. */

#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define OK 0
#define UNINITIALIZED 1
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define TIMEOUT 10
#define LOST 15
#define VERSION_MISMATCH 25
#define MAX 64
#define MANY 256

typedef struct {
    char uuid[96], bus[32], name[96], parent[96];
    unsigned long long memory_mib, used_mib;
    unsigned use, celsius, milliwatt;
    int answer, mig, slice, minor;
    long sleep_ms;
    long long value[24];
} gpu;
typedef struct { char a[96], b[96]; } link_pair;
typedef struct { char uuid[96], kind[16]; unsigned pid, use; unsigned long long memory_mib; } process;
typedef struct { char uuid[96]; unsigned long long number; long sequence; } xid;
typedef struct { char uuid[96], call[64]; int answer; } failure;

typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } pci_info;
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_info_2;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process_info;
typedef struct { unsigned pid; unsigned long long at_us; unsigned sm, memory, encoder, decoder; } process_use;
typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_data;
typedef struct {
    unsigned field, scope;
    long long at_us, latency_us;
    int type, answer;
    unsigned long long value;
} field_value;

/* What `set UUID KEY VALUE` may set, and the value of each where no line sets it; -1: the card does not support it. */
enum {
    CAPABILITY, SM_CLOCK, MEMORY_CLOCK, PCIE_TX, PCIE_RX, NVLINK_TX, NVLINK_RX, ECC_CORRECTED, ECC_UNCORRECTED, RETIRED,
    RETIRED_PENDING, REMAPPED, REMAP_PENDING, REMAP_FAILED, THROTTLE, RECOVERY, RESERVED, PROCESS_USE, SLEEP, KEYS
};
static const char *keys[KEYS] = {
    "capability", "sm_clock", "memory_clock", "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx", "ecc_corrected", "ecc_uncorrected",
    "retired", "retired_pending", "remapped", "remap_pending", "remap_failed", "throttle", "recovery", "reserved", "process_use",
    "sleep_ms"
};
static const long long initial[KEYS] = {80, 1410, 1215, 100, 200, -1, -1, 0, 0, -1, -1, 0, 0, 0, 0, -1, 0, 1, 0};

/* A handle is a pointer to one of these: it stays the same while the file changes. A card that was lost stays lost until the
   library is initialized anew, as with the driver. */
typedef struct { char uuid[96]; int lost; } handle;
typedef struct { char uuid[16][96]; int n, taken; long seen; } event_set;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int initialized, gpus_n, links_n, processes_n, xids_n, failures_n, init_answer, handles_n, cuda;
static char driver[80];
static gpu gpus[MAX];
static link_pair links[MAX];
static process processes[MANY];
static xid xids[MANY];
static failure failures[MAX];
static handle handles[MAX];
static event_set sets[MAX];

static void refuse(const char *line) {
    fprintf(stderr, "nvml stand-in: cannot read the line: %s\n", line);
    abort();
}

static void set(const char *uuid, const char *key, long long value, const char *line) {
    for (int i = 0; i < gpus_n; i++)
        if (!strcmp(gpus[i].uuid, uuid))
            for (int k = 0; k < KEYS; k++)
                if (!strcmp(keys[k], key)) {
                    gpus[i].value[k] = value;
                    return;
                }
    refuse(line);
}

static void load_living(void);

static void load(void) {
    const char *path = getenv("CRATER_NVML_FILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], a[96], b[96];
    long long value;
    gpus_n = links_n = processes_n = xids_n = failures_n = init_answer = 0;
    cuda = 12080;
    strcpy(driver, "0.0");
    if (!file) { init_answer = 9; return; }
    while (fgets(line, sizeof line, file)) {
        gpu g;
        process p;
        xid x;
        failure f;
        memset(&g, 0, sizeof g);
        memcpy(g.value, initial, sizeof initial);
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "driver %79s", driver) == 1) continue;
        if (sscanf(line, "cuda %d", &cuda) == 1) continue;
        if (sscanf(line, "init %d", &init_answer) == 1) continue;
        if (sscanf(line, "set %95s %95s %lld", a, b, &value) == 3) {
            set(a, b, value, line);
        } else if (sscanf(line, "fail %95s %63s %d", f.uuid, f.call, &f.answer) == 3) {
            failures[failures_n++] = f;
        } else if (sscanf(line, "process %95s %u %llu %u %15s", p.uuid, &p.pid, &p.memory_mib, &p.use, p.kind) == 5) {
            if (strcmp(p.kind, "compute") && strcmp(p.kind, "graphics") && strcmp(p.kind, "mps")) refuse(line);
            processes[processes_n++] = p;
        } else if (sscanf(line, "xid %95s %llu %ld", x.uuid, &x.number, &x.sequence) == 3) {
            xids[xids_n++] = x;
        } else if (sscanf(line, "link %95s %95s", a, b) == 2) {
            strcpy(links[links_n].a, a);
            strcpy(links[links_n++].b, b);
        } else if (sscanf(line, "gpu %95s %31s %llu %llu %u %u %u %d %d %95[^\n]", g.uuid, g.bus, &g.memory_mib, &g.used_mib, &g.use,
                          &g.celsius, &g.milliwatt, &g.answer, &g.mig, g.name) == 10) {
            for (int i = 0; i < gpus_n; i++) g.minor += !gpus[i].slice;
            gpus[gpus_n++] = g;
        } else if (sscanf(line, "slice %95s %95s %llu %95[^\n]", g.parent, g.uuid, &g.memory_mib, g.name) == 4) {
            g.slice = 1;
            gpus[gpus_n++] = g;
        } else if (line[0] && line[0] != '#') {
            refuse(line);
        }
        if (gpus_n == MAX || links_n == MAX || failures_n == MAX || processes_n == MANY || xids_n == MANY) refuse("too many lines");
    }
    fclose(file);
    load_living();
}

/* What cuda.c beside this file has allocated, of processes that live: it is used memory of the card, too. */
static void load_living(void) {
    char directory[512], path[800], line[512];
    snprintf(directory, sizeof directory, "%s.processes", getenv("CRATER_NVML_FILE"));
    DIR *all = opendir(directory);
    for (struct dirent *one; all && (one = readdir(all));) {
        int pid = atoi(one->d_name);
        if (pid <= 0 || kill(pid, 0)) continue;
        snprintf(path, sizeof path, "%s/%s", directory, one->d_name);
        FILE *file = fopen(path, "r");
        process p;
        while (file && fgets(line, sizeof line, file)) {
            if (sscanf(line, "process %95s %u %llu %u %15s", p.uuid, &p.pid, &p.memory_mib, &p.use, p.kind) != 5) refuse(line);
            processes[processes_n++] = p;
            if (processes_n == MANY) refuse("too many processes");
            for (int i = 0; i < gpus_n; i++)
                if (!strcmp(gpus[i].uuid, p.uuid)) {
                    gpus[i].used_mib += p.memory_mib;
                    gpus[i].use = gpus[i].use + p.use > 100 ? 100 : gpus[i].use + p.use;
                }
        }
        if (file) fclose(file);
    }
    if (all) closedir(all);
}

static handle *handle_of(const char *uuid) {
    for (int i = 0; i < handles_n; i++)
        if (!strcmp(handles[i].uuid, uuid)) return &handles[i];
    if (handles_n == MAX) abort();
    strcpy(handles[handles_n].uuid, uuid);
    handles[handles_n].lost = 0;
    return &handles[handles_n++];
}

/* The state of `device` now, copied; what `call` answers where it does not succeed. Sleeps where the file makes it slow. */
static int find(const char *call, void *device, gpu *found) {
    int answer = LOST;
    pthread_mutex_lock(&mutex);
    if (!initialized) { pthread_mutex_unlock(&mutex); return UNINITIALIZED; }
    handle *h = device;
    if (h < handles || h >= handles + handles_n) abort();
    load();
    for (int i = 0; i < gpus_n && !h->lost; i++)
        if (!strcmp(gpus[i].uuid, h->uuid)) {
            *found = gpus[i];
            answer = gpus[i].answer;
            if (gpus[i].slice) {
                /* A slice is lost with its card, and as slow. */
                for (int p = 0; p < gpus_n; p++)
                    if (!strcmp(gpus[p].uuid, gpus[i].parent)) {
                        if (!answer) answer = gpus[p].answer;
                        found->value[SLEEP] = gpus[p].value[SLEEP];
                    }
            }
        }
    if (answer == LOST) h->lost = 1;
    for (int i = 0; i < failures_n && !answer; i++)
        if (!strcmp(failures[i].uuid, h->uuid) && !strcmp(failures[i].call, call)) answer = failures[i].answer;
    pthread_mutex_unlock(&mutex);
    if (answer != LOST && found->value[SLEEP]) {
        struct timespec pause = {found->value[SLEEP] / 1000, found->value[SLEEP] % 1000 * 1000000L};
        nanosleep(&pause, NULL);
    }
    return answer;
}

#define FIND(device) \
    gpu g; \
    int answer = find(__func__, device, &g); \
    if (answer) return answer;

#define NUMBER(function, key, type) \
    int function(void *device, type *to) { \
        FIND(device) \
        if (g.slice || g.value[key] < 0) return NOT_SUPPORTED; \
        *to = (type)g.value[key]; \
        return OK; \
    }

static int text(const char *from, char *to, unsigned size) {
    if (strlen(from) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    if (flags) abort();
    pthread_mutex_lock(&mutex);
    load();
    int answer = init_answer;
    if (!answer && !initialized++)
        for (int i = 0; i < handles_n; i++) handles[i].lost = 0;
    pthread_mutex_unlock(&mutex);
    return answer;
}

int nvmlShutdown(void) {
    pthread_mutex_lock(&mutex);
    int answer = initialized ? OK : UNINITIALIZED;
    if (initialized) initialized--;
    pthread_mutex_unlock(&mutex);
    return answer;
}

const char *nvmlErrorString(int code) {
    static __thread char shown[40];
    switch (code) {
        case 4: return "Insufficient Permissions";
        case 9: return "Driver Not Loaded";
        case LOST: return "GPU is lost";
        case 999: return "Unknown Error";
        default: snprintf(shown, sizeof shown, "Error %d", code); return shown;
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    pthread_mutex_lock(&mutex);
    load();
    int answer = initialized ? text(driver, version, size) : UNINITIALIZED;
    pthread_mutex_unlock(&mutex);
    return answer;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    pthread_mutex_lock(&mutex);
    load();
    *version = cuda;
    int answer = initialized ? OK : UNINITIALIZED;
    pthread_mutex_unlock(&mutex);
    return answer;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    pthread_mutex_lock(&mutex);
    load();
    *count = 0;
    for (int i = 0; i < gpus_n; i++) *count += !gpus[i].slice;
    int answer = initialized ? OK : UNINITIALIZED;
    pthread_mutex_unlock(&mutex);
    return answer;
}

static int nth(const char *parent, unsigned index, void **device, int otherwise) {
    int answer = otherwise;
    pthread_mutex_lock(&mutex);
    if (!initialized) answer = UNINITIALIZED;
    load();
    for (int i = 0; i < gpus_n && answer == otherwise; i++)
        if (gpus[i].slice == !!parent && (!parent || !strcmp(gpus[i].parent, parent)) && index-- == 0) {
            *device = handle_of(gpus[i].uuid);
            answer = OK;
        }
    pthread_mutex_unlock(&mutex);
    return answer;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return nth(NULL, index, device, INVALID_ARGUMENT); }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    int answer = NOT_FOUND;
    pthread_mutex_lock(&mutex);
    if (!initialized) answer = UNINITIALIZED;
    load();
    for (int i = 0; i < handles_n && answer == NOT_FOUND; i++)
        if (!strcmp(handles[i].uuid, uuid) && handles[i].lost) answer = LOST;
    for (int i = 0; i < gpus_n && answer == NOT_FOUND; i++)
        if (!strcmp(gpus[i].uuid, uuid)) {
            *device = handle_of(uuid);
            answer = OK;
        }
    for (int i = 0; i < handles_n && answer == NOT_FOUND; i++)
        if (!strcmp(handles[i].uuid, uuid)) {
            handles[i].lost = 1;
            answer = LOST;
        }
    pthread_mutex_unlock(&mutex);
    return answer;
}

int nvmlDeviceGetPciInfo_v3(void *device, pci_info *info) {
    FIND(device)
    memset(info, 0, sizeof *info);
    return text(g.bus, info->busId, sizeof info->busId);
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    FIND(device)
    return text(g.uuid, uuid, size);
}

int nvmlDeviceGetName(void *device, char *name, unsigned size) {
    FIND(device)
    return text(g.name, name, size);
}

/* In the order of the file, as a driver numbers cards in the order in which it finds them. */
int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) {
    FIND(device)
    if (g.slice) return NOT_SUPPORTED;
    *minor = (unsigned)g.minor;
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    FIND(device)
    *major = (int)g.value[CAPABILITY] / 10;
    *minor = (int)g.value[CAPABILITY] % 10;
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_info *info) {
    FIND(device)
    info->total = g.memory_mib << 20;
    info->used = (g.used_mib + (unsigned long long)g.value[RESERVED]) << 20;
    info->free = info->total - info->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory_info_2 *info) {
    FIND(device)
    if (info->version != (sizeof *info | 2u << 24)) return VERSION_MISMATCH;
    info->total = g.memory_mib << 20;
    info->used = g.used_mib << 20;
    info->reserved = (unsigned long long)g.value[RESERVED] << 20;
    info->free = info->total - info->used - info->reserved;
    return OK;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    FIND(device)
    if (g.mig < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)g.mig;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    FIND(device)
    *count = 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **slice) {
    FIND(device)
    return nth(g.uuid, index, slice, NOT_FOUND);
}

int nvmlDeviceGetP2PStatus(void *one, void *other, int index, int *status) {
    gpu b;
    FIND(one)
    if (index != 2) abort();
    answer = find(__func__, other, &b);
    if (answer) return answer;
    *status = 5; /* Unknown, until a line says that there is a link. */
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < links_n; i++)
        if ((!strcmp(links[i].a, g.uuid) && !strcmp(links[i].b, b.uuid)) || (!strcmp(links[i].b, g.uuid) && !strcmp(links[i].a, b.uuid)))
            *status = 0;
    pthread_mutex_unlock(&mutex);
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *device, utilization *use) {
    FIND(device)
    if (g.slice) return NOT_SUPPORTED;
    use->gpu = g.use;
    use->memory = 0;
    return OK;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    FIND(device)
    if (sensor) abort();
    *celsius = g.celsius;
    return OK;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatt) {
    FIND(device)
    if (!g.milliwatt) return NOT_SUPPORTED;
    *milliwatt = g.milliwatt;
    return OK;
}

int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz) {
    FIND(device)
    if (type != 1 && type != 2) abort();
    int key = type == 1 ? SM_CLOCK : MEMORY_CLOCK;
    if (g.slice || g.value[key] < 0) return NOT_SUPPORTED;
    *mhz = (unsigned)g.value[key];
    return OK;
}

int nvmlDeviceGetPcieThroughput(void *device, int counter, unsigned *kib_a_second) {
    FIND(device)
    if (counter != 0 && counter != 1) abort();
    int key = counter ? PCIE_RX : PCIE_TX;
    if (g.slice || g.value[key] < 0) return NOT_SUPPORTED;
    *kib_a_second = (unsigned)g.value[key];
    return OK;
}

int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *count) {
    FIND(device)
    if ((type != 0 && type != 1) || counter != 0) abort();
    int key = type ? ECC_UNCORRECTED : ECC_CORRECTED;
    if (g.slice || g.value[key] < 0) return NOT_SUPPORTED;
    *count = (unsigned long long)g.value[key];
    return OK;
}

/* Half of them for each cause, the odd one for the second. */
int nvmlDeviceGetRetiredPages(void *device, int cause, unsigned *count, unsigned long long *pages) {
    FIND(device)
    if (cause != 0 && cause != 1) abort();
    if (g.slice || g.value[RETIRED] < 0) return NOT_SUPPORTED;
    unsigned there = (unsigned)(g.value[RETIRED] + cause) / 2, room = *count;
    *count = there;
    if (there && room < there) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; pages && i < there; i++) pages[i] = i;
    return OK;
}

NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, RETIRED_PENDING, unsigned)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, THROTTLE, unsigned long long)

int nvmlDeviceGetRemappedRows(void *device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    FIND(device)
    if (g.slice || g.value[REMAPPED] < 0) return NOT_SUPPORTED;
    *correctable = 0;
    *uncorrectable = (unsigned)g.value[REMAPPED];
    *pending = (unsigned)g.value[REMAP_PENDING];
    *failed = (unsigned)g.value[REMAP_FAILED];
    return OK;
}

int nvmlDeviceGetFieldValues(void *device, int count, field_value *values) {
    FIND(device)
    for (int i = 0; i < count; i++) {
        int key = values[i].field == 138 ? NVLINK_TX : values[i].field == 139 ? NVLINK_RX : values[i].field == 230 ? RECOVERY : -1;
        if (key < 0) abort();
        values[i].answer = g.slice || g.value[key] < 0 ? NOT_SUPPORTED : OK;
        values[i].type = key == RECOVERY ? 1 : 3;
        values[i].value = 0;
        if (!values[i].answer) values[i].value = (unsigned long long)g.value[key];
    }
    return OK;
}

/* A card has what runs on its slices, too. */
static int of_device(const gpu *g, const process *p) {
    if (!strcmp(p->uuid, g->uuid)) return 1;
    for (int i = 0; i < gpus_n; i++)
        if (gpus[i].slice && !strcmp(gpus[i].uuid, p->uuid) && !strcmp(gpus[i].parent, g->uuid)) return 1;
    return 0;
}

static int list(const gpu *g, const char *kind, unsigned *count, process_info *infos) {
    unsigned room = *count, there = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < processes_n; i++)
        if (of_device(g, &processes[i]) && !strcmp(processes[i].kind, kind)) {
            if (infos && there < room) {
                process_info info = {processes[i].pid, processes[i].memory_mib << 20, 0xFFFFFFFFu, 0xFFFFFFFFu};
                infos[there] = info;
            }
            there++;
        }
    pthread_mutex_unlock(&mutex);
    *count = there;
    return there > room || (there && !infos) ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_info *infos) {
    FIND(device)
    return list(&g, "compute", count, infos);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, process_info *infos) {
    FIND(device)
    return list(&g, "graphics", count, infos);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *count, process_info *infos) {
    FIND(device)
    return list(&g, "mps", count, infos);
}

/* One sample for each process that computes, of now: newer than any that was seen before. */
int nvmlDeviceGetProcessUtilization(void *device, process_use *samples, unsigned *count, unsigned long long since_us) {
    FIND(device)
    if (g.slice || !g.value[PROCESS_USE]) return NOT_SUPPORTED;
    unsigned room = *count, there = 0;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long now_us = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
    if (since_us > now_us) abort();
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < processes_n; i++)
        if (of_device(&g, &processes[i]) && processes[i].use) {
            if (samples && there < room) {
                process_use sample = {processes[i].pid, now_us, processes[i].use, 0, 0, 0};
                samples[there] = sample;
            }
            there++;
        }
    pthread_mutex_unlock(&mutex);
    *count = there;
    if (!there) return NOT_FOUND;
    return there > room || !samples ? INSUFFICIENT_SIZE : OK;
}

static long newest_xid(void) {
    long newest = 0;
    for (int i = 0; i < xids_n; i++)
        if (xids[i].sequence > newest) newest = xids[i].sequence;
    return newest;
}

/* A set hears of what comes after it was made. */
int nvmlEventSetCreate(void **made) {
    int answer = initialized ? INVALID_ARGUMENT : UNINITIALIZED;
    pthread_mutex_lock(&mutex);
    load();
    for (int i = 0; i < MAX && answer == INVALID_ARGUMENT; i++)
        if (!sets[i].taken) {
            sets[i].taken = 1;
            sets[i].n = 0;
            sets[i].seen = newest_xid();
            *made = &sets[i];
            answer = OK;
        }
    pthread_mutex_unlock(&mutex);
    return answer;
}

int nvmlEventSetFree(void *set_) {
    event_set *s = set_;
    if (s < sets || s >= sets + MAX || !s->taken) abort();
    s->taken = 0;
    return OK;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set_) {
    event_set *s = set_;
    FIND(device)
    if (s < sets || s >= sets + MAX || !s->taken || types != 8) abort();
    if (g.slice) return INVALID_ARGUMENT;
    strcpy(s->uuid[s->n++], g.uuid);
    return OK;
}

int nvmlEventSetWait_v2(void *set_, event_data *data, unsigned timeout_ms) {
    event_set *s = set_;
    if (s < sets || s >= sets + MAX || !s->taken) abort();
    struct stat before = {0}, now;
    for (unsigned waited = 0;; waited += 20) {
        int found = -1;
        const char *path = getenv("CRATER_NVML_FILE");
        if (waited && path && !stat(path, &now) && now.st_ino == before.st_ino && now.st_mtim.tv_nsec == before.st_mtim.tv_nsec) {
            if (waited >= timeout_ms) return TIMEOUT;
            usleep(20000);
            continue;
        }
        if (path) stat(path, &before);
        pthread_mutex_lock(&mutex);
        if (!initialized) { pthread_mutex_unlock(&mutex); return UNINITIALIZED; }
        load();
        for (int i = 0; i < xids_n; i++)
            for (int j = 0; j < s->n; j++)
                if (!strcmp(xids[i].uuid, s->uuid[j]) && xids[i].sequence > s->seen && (found < 0 || xids[i].sequence < xids[found].sequence))
                    found = i;
        if (found >= 0) {
            s->seen = xids[found].sequence;
            memset(data, 0, sizeof *data);
            data->device = handle_of(xids[found].uuid);
            data->type = 8;
            data->data = xids[found].number;
            data->gpu_instance = data->compute_instance = 0xFFFFFFFFu;
        }
        pthread_mutex_unlock(&mutex);
        if (found >= 0) return OK;
        if (waited >= timeout_ms) return TIMEOUT;
        usleep(20000);
    }
}
