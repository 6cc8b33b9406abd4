/* A library with the few symbols of CUDA's driver API that tests/hardware/cuda.py calls, for machines without a GPU.

   Its cards are those of the NVML stand-in's file (CRATER_NVML_FILE), counted by PCI bus and chosen by CUDA_VISIBLE_DEVICES, by UUID
   or by index, as CUDA does: an entry that is no card ends the list. What a process allocates is told to the NVML stand-in by a file
   of its own in CRATER_NVML_FILE.processes, and counts there while the process lives. CUDA_MPS_PINNED_DEVICE_MEM_LIMIT holds the
   process to its limit on device 0, as under MPS. It is strict: flags, handles and sizes that cannot be right end the process. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define OK 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define NO_DEVICE 100
#define MAX 16
#define MIB 1048576ULL

typedef struct { char uuid[96], bus[32]; unsigned long long memory_mib; } card;
typedef struct { unsigned char bytes[16]; } uuid_bytes;

static card cards[MAX], seen[MAX];
static int cards_n, seen_n, ready, current = -1, use;
static unsigned long long held[MAX];

static int by_bus(const void *a, const void *b) { return strcasecmp(((const card *)a)->bus, ((const card *)b)->bus); }

static void look(void) {
    const char *path = getenv("CRATER_NVML_FILE"), *wanted = getenv("CUDA_VISIBLE_DEVICES");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], list[1024];
    while (file && fgets(line, sizeof line, file))
        if (cards_n < MAX && sscanf(line, "gpu %95s %31s %llu", cards[cards_n].uuid, cards[cards_n].bus, &cards[cards_n].memory_mib) == 3)
            cards_n++;
    if (file) fclose(file);
    qsort(cards, (size_t)cards_n, sizeof *cards, by_bus);
    if (!wanted) {
        memcpy(seen, cards, sizeof cards);
        seen_n = cards_n;
        return;
    }
    snprintf(list, sizeof list, "%s", wanted);
    for (char *rest = NULL, *entry = strtok_r(list, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
        int found = -1;
        for (int i = 0; i < cards_n; i++) {
            char index[12];
            snprintf(index, sizeof index, "%d", i);
            if (!strcmp(entry, index) || !strcmp(entry, cards[i].uuid)) found = i;
        }
        if (found < 0 || seen_n == MAX) return;
        seen[seen_n++] = cards[found];
    }
}

static unsigned long long limit_of(int device) {
    const char *text = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    unsigned long long number;
    char unit = 0;
    if (device != 0 || !text || sscanf(text, "0=%llu%c", &number, &unit) < 1) return ~0ULL;
    return number * (unit == 'G' ? 1024 * MIB : unit == 'M' ? MIB : unit == 'K' ? 1024 : 1);
}

/* One file a process, replaced in one step. */
static void tell(void) {
    char directory[512], path[600], fresh[640];
    const char *kind = getenv("CUDA_MPS_PIPE_DIRECTORY") ? "mps" : "compute";
    snprintf(directory, sizeof directory, "%s.processes", getenv("CRATER_NVML_FILE"));
    mkdir(directory, 0777);
    snprintf(path, sizeof path, "%s/%d", directory, getpid());
    snprintf(fresh, sizeof fresh, "%s/.%d", directory, getpid());
    FILE *file = fopen(fresh, "w");
    if (!file) abort();
    for (int i = 0; i < seen_n; i++)
        if (held[i]) fprintf(file, "process %s %d %llu %d %s\n", seen[i].uuid, getpid(), held[i] / MIB, use, kind);
    if (fclose(file) || rename(fresh, path)) abort();
}

static void need(int right) {
    if (!right) {
        fprintf(stderr, "cuda stand-in: a call that cannot be right\n");
        abort();
    }
}

int cuInit(unsigned flags) {
    need(!flags);
    if (!ready) look();
    ready = 1;
    return seen_n ? OK : NO_DEVICE;
}

int cuDeviceGetCount(int *count) {
    need(ready);
    *count = seen_n;
    return OK;
}

int cuDeviceGet(int *device, int ordinal) {
    need(ready && ordinal >= 0 && ordinal < seen_n);
    *device = ordinal;
    return OK;
}

int cuDeviceGetUuid_v2(uuid_bytes *uuid, int device) {
    int n = 0;
    need(ready && device >= 0 && device < seen_n && !strncmp(seen[device].uuid, "GPU-", 4));
    for (const char *c = seen[device].uuid + 4; *c && n < 16; c++)
        if (*c != '-') {
            unsigned byte;
            need(sscanf(c++, "%2x", &byte) == 1);
            uuid->bytes[n++] = (unsigned char)byte;
        }
    need(n == 16);
    return OK;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    need(ready && device >= 0 && device < seen_n);
    *bytes = seen[device].memory_mib * MIB;
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    need(ready && device >= 0 && device < seen_n);
    *context = &seen[device];
    return OK;
}

int cuCtxSetCurrent(void *context) {
    card *which = context;
    need(which >= seen && which < seen + seen_n);
    current = (int)(which - seen);
    return OK;
}

int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) {
    need(current >= 0);
    if (!bytes) return INVALID_VALUE;
    unsigned long long most = seen[current].memory_mib * MIB, limit = limit_of(current);
    if (held[current] + bytes > (limit < most ? limit : most)) return OUT_OF_MEMORY;
    held[current] += bytes;
    *pointer = 0x7f0000000000ULL + held[current];
    tell();
    return OK;
}

int cuMemsetD8_v2(unsigned long long pointer, unsigned char value, size_t bytes) {
    (void)value;
    need(current >= 0 && pointer && bytes <= held[current]);
    if (!use) {
        use = 40;
        tell();
    }
    usleep(1000);
    return OK;
}

int cuCtxSynchronize(void) {
    need(current >= 0);
    return OK;
}
