/* A CUDA driver library that is none: it takes the calls that gpufleet makes as the documentation has them, refuses
 * whatever does not fit (a source where a target belongs, a size that is too large, a handle of another kind), keeps a
 * clock of its own for what the card "does", and writes each call with its time to a log.
 *
 * FAKE_CUDA names a text file, read anew at each call. One line each:
 *   fail NAME CODE       the call answers with an error
 *   block NAME           the call returns when the line is gone
 *   slow NAME US         the call takes so long
 *   rate GB_PER_S        of copies between host and card (within the card: 40 times that)
 *   clock MHZ            of the card; a launch after the other it comes nearer to that from a third of it
 *   corrupt WHAT         copy, peer: one byte of a copy (between cards) is wrong; sum: one thread of every second launch errs;
 *                        block: one block of gemm errs in every launch; nothing: it writes no result
 *   arch NUMBER          of the cards: major * 10 + minor
 *   no_peer              no card reaches another one's memory
 *   peer_rate GB_PER_S   of copies between two cards of which one was let into the other; else they go the long way
 * FAKE_CUDA_LOG names the log.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NO_BINARY = 209,
       BAD_PTX = 218, INVALID_HANDLE = 400, NOT_FOUND = 500, PEER_ENABLED = 704, PEER_NOT_ENABLED = 705 };
enum kind { CONTEXT = 0x11, STREAM, EVENT, MODULE, FUNCTION, HOST, DEVICE };

struct thing { enum kind kind; int live; char *bytes; size_t size; double at_ms; char name[64];
               struct thing *owner, *peer; int device; };
#define MOST 4096
#define REAL (1u << 20) /* of a copy only so much is done */
static struct thing things[MOST];
static struct thing *stack[8]; /* of contexts; the last one is current */
static int made, ready, launches, depth;
static double card_ms, warm = 0.34;

static double mono(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int say(const char *verb, const char *name, double *value) {
    static char text[1 << 14];
    char head[96];
    const char *path = getenv("FAKE_CUDA");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[size] = 0;
    snprintf(head, sizeof head, name[0] ? "%s %s" : "%s%s", verb, name);
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        size_t length = strlen(head);
        if (strncmp(line, head, length) || (line[length] && line[length] != ' ')) continue;
        if (value && line[length]) *value = atof(line + length);
        return 1;
    }
    return 0;
}

static void note(const char *name, const char *text) {
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%.6f %s %s\n", mono(), name, text);
    fclose(file);
}

static int begin(const char *name, const char *text) {
    double number = 0;
    note(name, text);
    while (say("block", name, NULL)) usleep(5000);
    if (say("slow", name, &number)) usleep((useconds_t)number);
    if (say("fail", name, &number)) return (int)number;
    return ready || !strcmp(name, "cuInit") ? 0 : NOT_INITIALIZED;
}
#define BEGIN(name, ...) \
    char text[160]; \
    snprintf(text, sizeof text, __VA_ARGS__); \
    int failed = begin(name, text); \
    if (failed) return failed

static struct thing *context(void) {
    return depth && stack[depth - 1]->live ? stack[depth - 1] : NULL;
}
static struct thing *make(enum kind kind, size_t size) {
    struct thing *new = &things[made++];
    new->owner = kind == CONTEXT ? NULL : context();
    new->kind = kind, new->live = 1, new->size = size, new->bytes = size ? calloc(1, size) : NULL;
    return new;
}
static struct thing *known(void *handle, enum kind kind) {
    struct thing *one = handle;
    int is = one >= things && one < things + made && one->kind == kind && one->live;
    return is && (kind == CONTEXT || one->owner == context()) ? one : NULL;
}
static int drop(void *handle, enum kind kind) {
    struct thing *one = known(handle, kind);
    if (!one) return INVALID_HANDLE;
    one->live = 0;
    free(one->bytes);
    return 0;
}
static struct thing *around(uint64_t address, size_t size, enum kind kind) {
    for (struct thing *one = things; one < things + made; one++) {
        uint64_t from = (uint64_t)(uintptr_t)one->bytes;
        if (one->kind == kind && one->live && address >= from && address + size <= from + one->size) return one;
    }
    return NULL;
}
static struct thing *mine(uint64_t address, size_t size) {
    struct thing *one = around(address, size, DEVICE);
    return one && one->owner == context() ? one : NULL;
}
static int architecture(void) {
    double number = 90;
    say("arch", "", &number);
    return (int)number;
}

EXPORT int cuInit(unsigned flags) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    BEGIN("cuInit", "%u %s", flags, visible ? visible : "all");
    ready = flags == 0;
    return ready ? 0 : INVALID_VALUE;
}
EXPORT int cuDeviceGetByPCIBusId(int *device, const char *pci) {
    BEGIN("cuDeviceGetByPCIBusId", "%s", pci);
    unsigned domain, bus, slot, function;
    if (sscanf(pci, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4) return INVALID_VALUE;
    *device = (int)bus - 16;
    return *device >= 0 && *device < 8 ? 0 : INVALID_DEVICE;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN("cuDeviceGetAttribute", "%d %d", attribute, device);
    *value = attribute == 16 ? 4 : attribute == 75 ? architecture() / 10 : architecture() % 10;
    return (attribute == 16 || attribute == 75 || attribute == 76) && device >= 0 ? 0 : INVALID_VALUE;
}
EXPORT int cuCtxCreate_v2(void **made_one, unsigned flags, int device) {
    BEGIN("cuCtxCreate_v2", "%u %d", flags, device);
    struct thing *new = make(CONTEXT, 0);
    new->device = device;
    *made_one = stack[depth++] = new;
    return 0;
}
EXPORT int cuCtxDestroy_v2(void *handle) {
    int left = 0;
    for (struct thing *one = things; one < things + made; one++)
        left += one->live && one->owner == handle && one->kind != FUNCTION;
    BEGIN("cuCtxDestroy_v2", "left=%d", left);
    if (depth && stack[depth - 1] == handle) depth--;
    return drop(handle, CONTEXT);
}
EXPORT int cuCtxPushCurrent_v2(void *handle) {
    BEGIN("cuCtxPushCurrent_v2", "-");
    if (!known(handle, CONTEXT) || depth == 8) return INVALID_CONTEXT;
    stack[depth++] = handle;
    return 0;
}
EXPORT int cuCtxPopCurrent_v2(void **popped) {
    BEGIN("cuCtxPopCurrent_v2", "-");
    if (!depth) return INVALID_CONTEXT;
    *popped = stack[--depth];
    return 0;
}
EXPORT int cuCtxSynchronize(void) {
    BEGIN("cuCtxSynchronize", "-");
    return context() ? 0 : INVALID_CONTEXT;
}
EXPORT int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    BEGIN("cuDeviceCanAccessPeer", "%d %d", device, peer);
    if (device < 0 || peer < 0 || device > 7 || peer > 7) return INVALID_DEVICE;
    *can = device != peer && !say("no_peer", "", NULL);
    return 0;
}
EXPORT int cuCtxEnablePeerAccess(void *peer, unsigned flags) {
    BEGIN("cuCtxEnablePeerAccess", "%u", flags);
    if (!known(peer, CONTEXT) || !context() || peer == context()) return INVALID_CONTEXT;
    if (context()->peer) return PEER_ENABLED;
    context()->peer = peer;
    return flags ? INVALID_VALUE : 0;
}
EXPORT int cuCtxDisablePeerAccess(void *peer) {
    BEGIN("cuCtxDisablePeerAccess", "-");
    if (!context() || !peer || context()->peer != peer) return PEER_NOT_ENABLED;
    context()->peer = NULL;
    return 0;
}
#define MAKE(name, kind) \
    EXPORT int name(void **made_one, unsigned flags) { \
        BEGIN(#name, "%u", flags); \
        if (!context()) return INVALID_CONTEXT; \
        *made_one = make(kind, 0); \
        return 0; \
    }
#define DROP(name, kind) \
    EXPORT int name(void *handle) { \
        BEGIN(#name, "-"); \
        return drop(handle, kind); \
    }
MAKE(cuStreamCreate, STREAM)
MAKE(cuEventCreate, EVENT)
DROP(cuStreamDestroy_v2, STREAM)
DROP(cuEventDestroy_v2, EVENT)
DROP(cuModuleUnload, MODULE)

EXPORT int cuEventRecord(void *event, void *stream) {
    BEGIN("cuEventRecord", "-");
    if (!known(event, EVENT) || !known(stream, STREAM)) return INVALID_HANDLE;
    known(event, EVENT)->at_ms = card_ms;
    return 0;
}
EXPORT int cuEventSynchronize(void *event) {
    BEGIN("cuEventSynchronize", "-");
    return known(event, EVENT) ? 0 : INVALID_HANDLE;
}
EXPORT int cuEventElapsedTime(float *ms, void *from, void *to) {
    BEGIN("cuEventElapsedTime", "-");
    if (!known(from, EVENT) || !known(to, EVENT)) return INVALID_HANDLE;
    *ms = (float)(known(to, EVENT)->at_ms - known(from, EVENT)->at_ms);
    snprintf(text, sizeof text, "%.3f", *ms);
    note("elapsed", text);
    return 0;
}
EXPORT int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    cpu_set_t mask;
    sched_getaffinity(0, sizeof mask, &mask);
    BEGIN("cuMemHostAlloc", "%zu %u cpus=%d", size, flags, CPU_COUNT(&mask));
    if (!context()) return INVALID_CONTEXT;
    *address = make(HOST, size)->bytes;
    return 0;
}
EXPORT int cuMemFreeHost(void *address) {
    BEGIN("cuMemFreeHost", "-");
    struct thing *one = around((uint64_t)(uintptr_t)address, 1, HOST);
    return one && one->bytes == address ? drop(one, HOST) : INVALID_VALUE;
}
EXPORT int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    BEGIN("cuMemAlloc_v2", "%zu", size);
    if (!context()) return INVALID_CONTEXT;
    *pointer = (uint64_t)(uintptr_t)make(DEVICE, size)->bytes;
    return 0;
}
EXPORT int cuMemFree_v2(uint64_t pointer) {
    BEGIN("cuMemFree_v2", "-");
    struct thing *one = mine(pointer, 1);
    return one && (uint64_t)(uintptr_t)one->bytes == pointer ? drop(one, DEVICE) : INVALID_VALUE;
}
EXPORT int cuMemsetD32_v2(uint64_t pointer, unsigned word, size_t count) {
    BEGIN("cuMemsetD32_v2", "%zu", count);
    if (!mine(pointer, 4 * count)) return INVALID_VALUE;
    uint32_t *words = (uint32_t *)(uintptr_t)pointer;
    for (size_t at = 0; at < count && at < REAL / 4; at++) words[at] = word;
    for (size_t at = count > REAL / 4 ? count - 1024 : count; at < count; at++) words[at] = word;
    return 0;
}
static int copy(uint64_t to, uint64_t from, size_t size, void *stream, enum kind target, enum kind source) {
    double rate = 50;
    if (!known(stream, STREAM)) return INVALID_HANDLE;
    if (!around(to, size, target) || !around(from, size, source)) return INVALID_VALUE;
    if (target == source && around(to, size, target)->owner != around(from, size, source)->owner) return INVALID_VALUE;
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size < REAL ? size : REAL);
    if (say("corrupt", "copy", NULL)) ((char *)(uintptr_t)to)[3] ^= 1;
    say("rate", "", &rate);
    card_ms += (double)size / 1e6 / rate / (target == source ? 40 : 1);
    return 0;
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    BEGIN("cuMemcpyHtoDAsync_v2", "%zu", size);
    return copy(to, (uint64_t)(uintptr_t)from, size, stream, DEVICE, HOST);
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
    BEGIN("cuMemcpyDtoHAsync_v2", "%zu", size);
    return copy((uint64_t)(uintptr_t)to, from, size, stream, HOST, DEVICE);
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
    BEGIN("cuMemcpyDtoDAsync_v2", "%zu", size);
    return copy(to, from, size, stream, DEVICE, DEVICE);
}
EXPORT int cuMemcpyPeerAsync(uint64_t to, void *there, uint64_t from, void *here, size_t size, void *stream) {
    BEGIN("cuMemcpyPeerAsync", "%zu", size);
    double rate = 380;
    if (!known(here, CONTEXT) || !known(there, CONTEXT)) return INVALID_CONTEXT;
    struct thing *target = around(to, size, DEVICE), *source = around(from, size, DEVICE);
    if (!known(stream, STREAM)) return INVALID_HANDLE;
    if (!target || !source || target->owner != there || source->owner != here) return INVALID_VALUE;
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size < REAL ? size : REAL);
    if (size > REAL) memcpy((char *)(uintptr_t)to + size - 4096, (char *)(uintptr_t)from + size - 4096, 4096);
    if (say("corrupt", "peer", NULL)) ((char *)(uintptr_t)to)[3] ^= 1;
    say("peer_rate", "", &rate);
    card_ms += (double)size / 1e6 / (source->owner->peer == there ? rate : 10);
    return 0;
}
EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    BEGIN("cuMemcpyDtoH_v2", "%zu", size);
    if (!mine(from, size)) return INVALID_VALUE;
    memcpy(to, (void *)(uintptr_t)from, size);
    return 0;
}
EXPORT int cuModuleLoadData(void **module, const void *image) {
    BEGIN("cuModuleLoadData", "%zu", strlen(image));
    char name[64];
    const char *entry = strstr(image, ".visible .entry ");
    if (strncmp(image, ".version ", 9) || !entry || sscanf(entry, ".visible .entry %63[a-z_]", name) != 1) return BAD_PTX;
    const char *target = strstr(image, "\n.target sm_");
    if (!target || atoi(target + 12) > architecture()) return NO_BINARY;
    struct thing *new = make(MODULE, 0);
    strcpy(new->name, name);
    *module = new;
    return 0;
}
EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
    BEGIN("cuModuleGetFunction", "%s", name);
    struct thing *from = known(module, MODULE);
    if (!from) return INVALID_HANDLE;
    if (strcmp(from->name, name)) return NOT_FOUND;
    struct thing *new = make(FUNCTION, 0);
    strcpy(new->name, name);
    *function = new;
    return 0;
}
EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **params, void **extra) {
    BEGIN("cuLaunchKernel", "%u %u", gx, bx);
    struct thing *kernel = known(function, FUNCTION);
    if (!kernel || !known(stream, STREAM)) return INVALID_HANDLE;
    uint64_t slots = *(uint64_t *)params[0];
    uint32_t loops = *(uint32_t *)params[1];
    size_t threads = (size_t)gx * bx;
    if (gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || extra || !loops) return INVALID_VALUE;
    if (!mine(slots, 8 * threads)) return INVALID_VALUE;
    int counts = !strcmp(kernel->name, "gpufleet_clock");
    double mhz = 1755;
    say("clock", "", &mhz);
    warm += (1 - warm) / 2;
    int gemm = !strcmp(kernel->name, "gpufleet_gemm");
    double cycles = (double)loops * (counts ? 64 * 4.05 : gemm ? 8 * 16 * 16 : 8 * 32 * 2.02);
    card_ms += cycles / (mhz * warm * 1e3);
    launches++;
    if (gemm) {
        uint32_t *words = (uint32_t *)(uintptr_t)slots;
        size_t done = say("corrupt", "nothing", NULL) ? threads : 0;
        for (size_t at = done; at < threads; at++)
            words[at] = loops * 2654435761u ^ (uint32_t)(at % bx), words[threads + at] = 1 + (uint32_t)(at / bx % 4);
        if (launches % 2 && say("corrupt", "sum", NULL)) words[10] ^= 1;
        if (say("corrupt", "block", NULL)) words[2 * bx + 1] ^= 0x80000000u;
        return 0;
    }
    for (size_t at = 0; at < threads; at++) {
        ((float *)(uintptr_t)slots)[2 * at] = 1.0f + (float)at;
        if (counts) ((uint32_t *)(uintptr_t)slots)[2 * at + 1] = (uint32_t)cycles;
    }
    if (launches % 2 && say("corrupt", "sum", NULL)) ((float *)(uintptr_t)slots)[10] += 1e-3f;
    return 0;
}
EXPORT int cuGetErrorName(int number, const char **name) {
    *name = number == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : number == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_OF_SOME_KIND";
    return 0;
}
