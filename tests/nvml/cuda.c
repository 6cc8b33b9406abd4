/* A library with the few symbols of CUDA's driver API that tests/hardware/cuda.py calls, for machines without a GPU.

   Its cards are those of the NVML stand-in's file (CRATER_NVML_FILE), counted by PCI bus and chosen by CUDA_VISIBLE_DEVICES, by UUID
   or by index, as CUDA does: an entry that is no card ends the list. What a process allocates is told to the NVML stand-in by a file
   of its own in CRATER_NVML_FILE.processes, and counts there while the process lives. Without that variable the file is `gpus` beside
   this library. Where CUDA_MPS_PIPE_DIRECTORY leads to a daemon of tests/mps the process is its client, and
   CUDA_MPS_PINNED_DEVICE_MEM_LIMIT holds it to its limit on device 0; where it leads to none it runs on without. It is strict: flags, handles and sizes that cannot be right end the process. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define OK 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define NO_DEVICE 100
#define MPS_CONNECTION_FAILED 805
#define MAX 16
#define MIB 1048576ULL

typedef struct { char uuid[96], bus[32]; unsigned long long memory_mib; } card;
typedef struct { unsigned char bytes[16]; } uuid_bytes;

static card cards[MAX], seen[MAX];
static int cards_n, seen_n, ready, current = -1, use;
static unsigned long long held[MAX];

static int mps = -1; /* The connection to the daemon. */

static const char *cards_file(void) {
    static char beside[512];
    const char *given = getenv("CRATER_NVML_FILE");
    Dl_info here;
    if (given) return given;
    if (!dladdr((void *)cards_file, &here) || !here.dli_fname) abort();
    snprintf(beside, sizeof beside, "%s", here.dli_fname);
    char *slash = strrchr(beside, '/');
    if (!slash) abort();
    strcpy(slash + 1, "gpus");
    return beside;
}

/* Whether the process may go on: as a client, or without MPS where there is no daemon. */
static int join_mps(void) {
    const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char line[64];
    if (!pipe) return 1;
    snprintf(address.sun_path, sizeof address.sun_path, "%s/control", pipe);
    int to = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(to, (struct sockaddr *)&address, sizeof address)) {
        close(to);
        return 1;
    }
    int length = snprintf(line, sizeof line, "client %d %u\n", getpid(), geteuid());
    if (write(to, line, (size_t)length) != length || read(to, line, sizeof line) < 3 || strncmp(line, "ok\n", 3)) {
        close(to);
        return 0;
    }
    mps = to;
    return 1;
}

static int by_bus(const void *a, const void *b) { return strcasecmp(((const card *)a)->bus, ((const card *)b)->bus); }

static void look(void) {
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    FILE *file = fopen(cards_file(), "r");
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
    if (mps < 0 || device != 0 || !text || sscanf(text, "0=%llu%c", &number, &unit) < 1) return ~0ULL;
    return number * (unit == 'G' ? 1024 * MIB : unit == 'M' ? MIB : unit == 'K' ? 1024 : 1);
}

/* One file a process, replaced in one step. */
static void tell(void) {
    char directory[512], path[600], fresh[640];
    const char *kind = mps >= 0 ? "mps" : "compute";
    snprintf(directory, sizeof directory, "%s.processes", cards_file());
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
    if (!ready && seen_n && !join_mps()) return MPS_CONNECTION_FAILED;
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
