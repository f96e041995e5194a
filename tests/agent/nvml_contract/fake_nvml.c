/* A driver library that is none: the functions and structures of NVIDIA's that gpufleet depends on, with
 * answers and faults from a text file, read anew at each call, so that a test flips them while it runs.
 *
 * The file is named by FAKE_NVML. One line each; the last that matches wins; "@1" limits it to one card:
 *   fail NAME[@1] CODE          the call answers with an error
 *   text NAME[@1] WORDS         a string getter's answer      bytes NAME[@1] HEX   the same, any bytes
 *   number NAME[@1] N [N...]    numbers of a call, in the order of its structure
 *   field ID[:LINK][@1] TYPE VALUE RET   one answer of the batch
 *   fail NAME:LINK[@1] CODE     the call answers so for one link; "number links N": how many links there are
 *   block NAME[@1]              the call returns when the line is gone
 *   crash NAME[@1]              the call ends the process
 *
 * -DOLD_DRIVER leaves out what drivers of 2021 did not have.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define CARDS 16

struct card { int slot; };
static struct card cards[CARDS];

struct field_value {
    uint32_t id, scope;
    int64_t timestamp, latency;
    uint32_t type, ret;
    union { double d; uint32_t ui; unsigned long ul; unsigned long long ull; long long sll; int si; unsigned short us; } value;
};
struct pci_info { char legacy[16]; uint32_t domain, bus, device, id, subsystem; char bus_id[32]; };
struct memory { uint64_t total, free, used; };
struct memory_v2 { uint32_t version; uint64_t total, reserved, free, used; };
struct utilization { uint32_t gpu, memory; };
struct temperature { uint32_t version; uint32_t sensor; int32_t value; };
struct margin { uint32_t version; int32_t value; };
struct violation { uint64_t reference, time; };
struct histogram { uint32_t max, high, partial, low, none; };
struct sram { uint32_t version; uint64_t counts[11]; uint32_t exceeded; };
struct fabric_v2 { uint32_t version; unsigned char uuid[16]; uint32_t status, clique; unsigned char state; uint32_t mask; };
struct fabric_v3 { uint32_t version; unsigned char uuid[16]; uint32_t status, clique; unsigned char state; uint32_t mask; unsigned char summary; };
struct process { uint32_t pid; uint64_t used; uint32_t instance, compute; };
struct gpm_support { uint32_t version, supported; };
struct gpm_metric { uint32_t id, ret; double value; const char *names[3]; };
struct gpm_between { uint32_t version, size; const long *before, *newest; struct gpm_metric metrics[]; };
struct pdi { uint32_t version; uint64_t value; };
struct repair { uint32_t version, channel, tpc; };
struct unrepairable { uint32_t version, flag; };
struct platform { uint32_t version; unsigned char guid[16], chassis[16], slot, tray, host, peer, module; };

_Static_assert(sizeof(struct field_value) == 40, "field value");
_Static_assert(sizeof(struct gpm_metric) == 40, "gpm metric");
_Static_assert(sizeof(struct pci_info) == 68, "pci info");
_Static_assert(sizeof(struct memory_v2) == 40, "memory v2");
_Static_assert(sizeof(struct sram) == 104, "sram status");
_Static_assert(sizeof(struct fabric_v2) == 36, "fabric v2");
_Static_assert(sizeof(struct fabric_v3) == 40, "fabric v3");
_Static_assert(sizeof(struct platform) == 44, "platform");
_Static_assert(sizeof(struct process) == 24, "process");

#define VERSION(type, number) ((uint32_t)(sizeof(type) | (number) << 24))

/* ---- the text file */

static char *state(void) {
    static char text[1 << 16];
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[size] = 0;
    return text;
}

/* What follows "VERB NAME" or "VERB NAME@SLOT" in the last line that begins so. */
static int say(const char *verb, const char *name, int slot, char *rest, size_t size) {
    char any[160], one[160];
    snprintf(any, sizeof any, "%s %s", verb, name);
    snprintf(one, sizeof one, "%s %s@%d", verb, name, slot);
    int found = 0;
    for (char *line = state(), *end; *line; line = *end ? end + 1 : end) {
        end = line + strcspn(line, "\n");
        const char *heads[] = {any, one};
        for (int i = 0; i < 2; i++) {
            size_t length = strlen(heads[i]);
            if ((size_t)(end - line) < length || strncmp(line, heads[i], length)) continue;
            if (line + length != end && line[length] != ' ') continue;
            const char *from = line + length + (line + length != end);
            snprintf(rest, size, "%.*s", (int)(end - from), from);
            found = 1;
        }
    }
    return found;
}

static int slot_of(void *handle) { return handle ? ((struct card *)handle)->slot : -1; }

static int begin(const char *name, void *handle) {
    char rest[64];
    int slot = slot_of(handle);
    if (say("crash", name, slot, rest, sizeof rest)) *(volatile int *)8 = 1;
    while (say("block", name, slot, rest, sizeof rest)) usleep(10000);
    return say("fail", name, slot, rest, sizeof rest) ? atoi(rest) : 0;
}

static long long number(const char *name, void *handle, int place, long long usual) {
    char rest[512], *word = rest;
    if (!say("number", name, slot_of(handle), rest, sizeof rest)) return usual;
    for (char *end; ; word = end, place--) {
        unsigned long long value = strtoull(word, &end, 0);
        if (end == word) return usual;
        if (place == 0) return (long long)value;
    }
}

static int text(const char *name, void *handle, char *buffer, unsigned size, const char *usual) {
    char rest[512];
    int ret = begin(name, handle);
    if (ret) return ret;
    if (say("bytes", name, slot_of(handle), rest, sizeof rest)) {
        unsigned length = 0;
        for (unsigned byte; length + 1 < size && sscanf(rest + 2 * length, "%2x", &byte) == 1; length++)
            buffer[length] = (char)byte;
        buffer[length] = 0;
        return 0;
    }
    if (!say("text", name, slot_of(handle), rest, sizeof rest)) snprintf(rest, sizeof rest, "%s", usual);
    if (strlen(rest) >= size) return 7;
    strcpy(buffer, rest);
    return 0;
}

#define TEXT(name, usual) \
    EXPORT int name(void *card, char *buffer, unsigned size) { return text(#name, card, buffer, size, usual); }
#define NUMBER(name, type, usual) \
    EXPORT int name(void *card, type *out) { \
        int ret = begin(#name, card); \
        if (!ret) *out = (type)number(#name, card, 0, usual); \
        return ret; \
    }
#define NUMBER_OF(name, type, usual) \
    EXPORT int name(void *card, unsigned which, type *out) { \
        int ret = begin(#name, card); \
        if (!ret) *out = (type)number(#name, card, (int)which, usual); \
        return ret; \
    }
#define PAIR(name, first, second) \
    EXPORT int name(void *card, unsigned *one, unsigned *other) { \
        int ret = begin(#name, card); \
        if (!ret) *one = (unsigned)number(#name, card, 0, first), *other = (unsigned)number(#name, card, 1, second); \
        return ret; \
    }

/* ---- the library */

EXPORT int nvmlInitWithFlags(unsigned flags) { (void)flags; return begin("nvmlInitWithFlags", NULL); }
EXPORT int nvmlShutdown(void) { return begin("nvmlShutdown", NULL); }
EXPORT const char *nvmlErrorString(int code) { return code == 27 ? "not ready" : "some error"; }
EXPORT int nvmlSystemGetDriverVersion(char *buffer, unsigned size) {
    return text("nvmlSystemGetDriverVersion", NULL, buffer, size, "570.133.20");
}
EXPORT int nvmlSystemGetNVMLVersion(char *buffer, unsigned size) {
    return text("nvmlSystemGetNVMLVersion", NULL, buffer, size, "12.570.133.20");
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    int ret = begin("nvmlSystemGetCudaDriverVersion_v2", NULL);
    if (!ret) *out = (int)number("nvmlSystemGetCudaDriverVersion_v2", NULL, 0, 12080);
    return ret;
}
static unsigned count(void) { return (unsigned)number("nvmlDeviceGetCount_v2", NULL, 0, 2); }
EXPORT int nvmlDeviceGetCount_v2(unsigned *out) {
    int ret = begin("nvmlDeviceGetCount_v2", NULL);
    if (!ret) *out = count();
    return ret;
}
static int handle(const char *name, int slot, void **out) {
    if (slot < 0 || slot >= (int)count()) return 6;
    cards[slot].slot = slot;
    int ret = begin(name, &cards[slot]);
    if (!ret) *out = &cards[slot];
    return ret;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    return handle("nvmlDeviceGetHandleByIndex_v2", (int)index, out);
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **out) {
    unsigned domain, bus;
    if (sscanf(address, "%x:%x:", &domain, &bus) != 2) return 2;
    return handle("nvmlDeviceGetHandleByPciBusId_v2", (int)bus - 16, out);
}
EXPORT int nvmlDeviceGetPciInfo_v3(void *card, struct pci_info *out) {
    int ret = begin("nvmlDeviceGetPciInfo_v3", card);
    if (ret) return ret;
    memset(out, 0, sizeof *out);
    out->bus = 16 + (uint32_t)slot_of(card);
    out->id = (uint32_t)number("nvmlDeviceGetPciInfo_v3", card, 0, 0x233010DE);
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:00.0", 0, out->bus);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:00.0", 0, out->bus);
    return 0;
}
EXPORT int nvmlDeviceGetUUID(void *card, char *buffer, unsigned size) {
    char usual[64];
    snprintf(usual, sizeof usual, "GPU-00000000-0000-4000-8000-%012d", slot_of(card));
    return text("nvmlDeviceGetUUID", card, buffer, size, usual);
}

/* ---- who a card is */

TEXT(nvmlDeviceGetName, "NVIDIA H100 80GB HBM3")
TEXT(nvmlDeviceGetSerial, "1650522000001")
TEXT(nvmlDeviceGetBoardPartNumber, "692-2G520-0200-000")
TEXT(nvmlDeviceGetVbiosVersion, "96.00.89.00.01")
TEXT(nvmlDeviceGetInforomImageVersion, "G520.0200.00.05")
EXPORT int nvmlDeviceGetGspFirmwareVersion(void *card, char *buffer) {
    return text("nvmlDeviceGetGspFirmwareVersion", card, buffer, 64, "570.133.20");
}
NUMBER(nvmlDeviceGetInforomConfigurationChecksum, unsigned, 0x12345678)
EXPORT int nvmlDeviceValidateInforom(void *card) { return begin("nvmlDeviceValidateInforom", card); }
NUMBER(nvmlDeviceGetMinorNumber, unsigned, slot_of(card))
NUMBER(nvmlDeviceGetModuleId, unsigned, 5)
NUMBER(nvmlDeviceGetArchitecture, unsigned, 9)
NUMBER(nvmlDeviceGetVirtualizationMode, uint64_t, 0)
NUMBER(nvmlDeviceGetMemoryBusWidth, unsigned, 5120)
NUMBER_OF(nvmlDeviceGetMaxCustomerBoostClock, unsigned, 1980)
EXPORT int nvmlDeviceGetMaxClockInfo(void *card, unsigned which, unsigned *out) {
    int ret = begin("nvmlDeviceGetMaxClockInfo", card);
    if (!ret) *out = which == 2 ? 2619 : 1980;
    return ret;
}

/* ---- what it does */

EXPORT int nvmlDeviceGetUtilizationRates(void *card, struct utilization *out) {
    int ret = begin("nvmlDeviceGetUtilizationRates", card);
    if (ret) return ret;
    out->gpu = (uint32_t)number("nvmlDeviceGetUtilizationRates", card, 0, 97);
    out->memory = (uint32_t)number("nvmlDeviceGetUtilizationRates", card, 1, 61);
    return 0;
}
EXPORT int nvmlDeviceGetClockInfo(void *card, unsigned which, unsigned *out) {
    int ret = begin("nvmlDeviceGetClockInfo", card);
    if (!ret) *out = which == 2 ? 2619 : 1755;
    return ret;
}
NUMBER(nvmlDeviceGetPowerUsage, unsigned, 690500)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, 700000)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, 650000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, 700000)
PAIR(nvmlDeviceGetPowerManagementLimitConstraints, 200000, 700000)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, uint64_t, 5000500)
NUMBER(nvmlDeviceGetPerformanceState, unsigned, 0)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, uint64_t, 6)
EXPORT int nvmlDeviceGetTemperature(void *card, unsigned sensor, unsigned *out) {
    int ret = begin("nvmlDeviceGetTemperature", card);
    if (!ret) *out = (unsigned)number("nvmlDeviceGetTemperature", card, (int)sensor, 63);
    return ret;
}
NUMBER_OF(nvmlDeviceGetTemperatureThreshold, unsigned, 95)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 5)
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, 6)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, 3)
EXPORT int nvmlDeviceGetViolationStatus(void *card, unsigned policy, struct violation *out) {
    int ret = begin("nvmlDeviceGetViolationStatus", card);
    if (ret) return ret;
    out->reference = 1;
    out->time = 1000000000ull * (policy + 4);
    return 0;
}
EXPORT int nvmlDeviceGetMemoryInfo(void *card, struct memory *out) {
    int ret = begin("nvmlDeviceGetMemoryInfo", card);
    if (ret) return ret;
    out->total = (uint64_t)number("nvmlDeviceGetMemoryInfo", card, 0, 85520809984ll);
    out->used = (uint64_t)number("nvmlDeviceGetMemoryInfo", card, 1, 70500000000ll);
    out->free = out->total - out->used;
    return 0;
}

/* ---- its links */

static int of_link(const char *name, void *card, unsigned link) {
    char one[96], rest[64];
    int ret = begin(name, card), links = (int)number("links", card, 0, 0);
    if (ret) return ret;
    snprintf(one, sizeof one, "%s:%u", name, link);
    if (say("fail", one, slot_of(card), rest, sizeof rest)) return atoi(rest);
    return links == 0 ? 3 : (int)link < links ? 0 : 2;
}
#define OF_LINK(name, usual) \
    EXPORT int name(void *card, unsigned link, unsigned *out) { \
        int ret = of_link(#name, card, link); \
        if (!ret) *out = (unsigned)number(#name, card, (int)link, usual); \
        return ret; \
    }
OF_LINK(nvmlDeviceGetNvLinkState, 1)
OF_LINK(nvmlDeviceGetNvLinkVersion, 6)
OF_LINK(nvmlDeviceGetNvLinkRemoteDeviceType, 2)
EXPORT int nvmlDeviceGetNvLinkErrorCounter(void *card, unsigned link, unsigned counter, unsigned long long *out) {
    int ret = of_link("nvmlDeviceGetNvLinkErrorCounter", card, link);
    if (!ret) *out = 1000 * link + counter;
    return ret;
}
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *card, unsigned link, struct pci_info *out) {
    int ret = of_link("nvmlDeviceGetNvLinkRemotePciInfo_v2", card, link);
    if (ret) return ret;
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:00.0", 0, 7 + link % 4);
    return 0;
}

/* ---- how it is */

NUMBER(nvmlDeviceGetFanSpeed, unsigned, 30)
NUMBER_OF(nvmlDeviceGetApplicationsClock, unsigned, 1980)
PAIR(nvmlDeviceGetEccMode, 1, 1)
PAIR(nvmlDeviceGetMigMode, 0, 0)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, 1)
NUMBER(nvmlDeviceGetComputeMode, unsigned, 3)
EXPORT int nvmlDeviceGetTotalEccErrors(void *card, unsigned kind, unsigned counter, uint64_t *out) {
    int ret = begin("nvmlDeviceGetTotalEccErrors", card);
    if (!ret) *out = 10 * kind + counter;
    return ret;
}
EXPORT int nvmlDeviceGetMemoryErrorCounter(void *card, unsigned kind, unsigned counter, unsigned where, uint64_t *out) {
    int ret = begin("nvmlDeviceGetMemoryErrorCounter", card);
    if (!ret) *out = 100 * where + 10 * kind + counter;
    return ret;
}
EXPORT int nvmlDeviceGetRemappedRows(void *card, unsigned *corrected, unsigned *other, unsigned *pending, unsigned *failed) {
    const char *name = "nvmlDeviceGetRemappedRows";
    int ret = begin(name, card);
    if (ret) return ret;
    *corrected = (unsigned)number(name, card, 0, 1);
    *other = (unsigned)number(name, card, 1, 2);
    *pending = (unsigned)number(name, card, 2, 1);
    *failed = (unsigned)number(name, card, 3, 0);
    return 0;
}
EXPORT int nvmlDeviceGetRowRemapperHistogram(void *card, struct histogram *out) {
    int ret = begin("nvmlDeviceGetRowRemapperHistogram", card);
    if (ret) return ret;
    uint32_t *place = &out->max;
    for (int i = 0; i < 5; i++)
        place[i] = (uint32_t)number("nvmlDeviceGetRowRemapperHistogram", card, i, i ? 0 : 2560);
    return 0;
}
static int pages(const char *name, void *card, unsigned cause, unsigned *size, uint64_t *out, uint64_t *times) {
    int ret = begin(name, card);
    if (ret) return ret;
    unsigned have = cause + 1, room = *size;
    *size = have;
    if (!out || room < have) return 7;
    for (unsigned i = 0; i < have; i++) {
        out[i] = 0x1000 * i;
        if (times) times[i] = i;
    }
    return 0;
}
EXPORT int nvmlDeviceGetRetiredPages(void *card, unsigned cause, unsigned *size, uint64_t *out) {
    return pages("nvmlDeviceGetRetiredPages", card, cause, size, out, NULL);
}
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, 1)
EXPORT int nvmlDeviceGetFieldValues(void *card, int size, struct field_value *out) {
    int ret = begin("nvmlDeviceGetFieldValues", card);
    if (ret) return ret;
    for (int i = 0; i < size; i++) {
        char id[16], one[32], rest[128];
        snprintf(id, sizeof id, "%u", out[i].id);
        snprintf(one, sizeof one, "%u:%u", out[i].id, out[i].scope);
        out[i].type = 3;
        out[i].ret = 3;
        out[i].value.ull = 0xDEADBEEFDEADBEEFull; /* whoever reads this did not look at ret */
        if (say("field", one, slot_of(card), rest, sizeof rest) || say("field", id, slot_of(card), rest, sizeof rest)) {
            char *word = rest;
            out[i].type = (uint32_t)strtoul(word, &word, 0);
            char *value = word;
            long long whole = (long long)strtoll(value, &word, 0);
            if (out[i].type == 0) out[i].value.d = strtod(value, &word);
            else if (out[i].type == 1) out[i].value.ui = (uint32_t)whole;
            else if (out[i].type == 5) out[i].value.si = (int)whole;
            else if (out[i].type == 6) out[i].value.us = (unsigned short)whole;
            else out[i].value.ull = strtoull(value, &word, 0);
            out[i].ret = (uint32_t)strtoul(word, NULL, 0);
        }
    }
    return 0;
}
static int processes(const char *name, void *card, unsigned *size, struct process *out) {
    int ret = begin(name, card);
    if (ret) return ret;
    unsigned room = *size, have = (unsigned)number(name, card, 0, 0);
    *size = have;
    if (have == 0) return 0;
    if (!out || room < have) return 7;
    for (unsigned i = 0; i < have; i++) {
        memset(&out[i], 0xFF, sizeof out[i]);
        out[i].pid = (uint32_t)number(name, card, 1 + 2 * (int)i, 1);
        out[i].used = (uint64_t)number(name, card, 2 + 2 * (int)i, -1);
    }
    return 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(void *card, unsigned *size, struct process *out) {
    return processes("nvmlDeviceGetComputeRunningProcesses_v2", card, size, out);
}

#ifndef OLD_DRIVER

/* a sample is a number that grows by ten with each one that is taken */
EXPORT int nvmlGpmQueryDeviceSupport(void *card, struct gpm_support *out) {
    int ret = begin("nvmlGpmQueryDeviceSupport", card);
    if (ret) return ret;
    if (out->version != 1) return 25;
    out->supported = (uint32_t)number("nvmlGpmQueryDeviceSupport", card, 0, 1);
    return 0;
}
EXPORT int nvmlGpmSampleAlloc(long **out) {
    int ret = begin("nvmlGpmSampleAlloc", NULL);
    if (!ret && !(*out = calloc(1, sizeof **out))) ret = 20;
    return ret;
}
EXPORT int nvmlGpmSampleFree(long *sample) { free(sample); return begin("nvmlGpmSampleFree", NULL); }
EXPORT int nvmlGpmSampleGet(void *card, long *sample) {
    static long taken;
    int ret = begin("nvmlGpmSampleGet", card);
    if (!ret) *sample = taken += 10;
    return ret;
}
EXPORT int nvmlGpmMetricsGet(struct gpm_between *out) {
    int ret = begin("nvmlGpmMetricsGet", NULL);
    if (ret) return ret;
    if (out->version != 1) return 25;
    for (uint32_t i = 0; i < out->size; i++) {
        out->metrics[i].value = (double)(*out->newest - *out->before) + out->metrics[i].id;
        out->metrics[i].ret = out->metrics[i].id == 5 ? 3 : 0;
    }
    return 0;
}

NUMBER(nvmlDeviceGetCurrentClocksEventReasons, uint64_t, 4)
EXPORT int nvmlDeviceGetTemperatureV(void *card, struct temperature *out) {
    int ret = begin("nvmlDeviceGetTemperatureV", card);
    if (ret) return ret;
    if (out->version != VERSION(struct temperature, 1)) return 25;
    out->value = (int32_t)number("nvmlDeviceGetTemperatureV", card, 0, 64);
    return 0;
}
EXPORT int nvmlDeviceGetMarginTemperature(void *card, struct margin *out) {
    int ret = begin("nvmlDeviceGetMarginTemperature", card);
    if (ret) return ret;
    if (out->version != VERSION(struct margin, 1)) return 25;
    out->value = (int32_t)number("nvmlDeviceGetMarginTemperature", card, 0, 23);
    return 0;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *card, struct memory_v2 *out) {
    int ret = begin("nvmlDeviceGetMemoryInfo_v2", card);
    if (ret) return ret;
    if (out->version != VERSION(struct memory_v2, 2)) return 25;
    out->total = (uint64_t)number("nvmlDeviceGetMemoryInfo_v2", card, 0, 85520809984ll);
    out->used = (uint64_t)number("nvmlDeviceGetMemoryInfo_v2", card, 1, 70000000000ll);
    out->reserved = 500000000;
    out->free = out->total - out->used - out->reserved;
    return 0;
}
EXPORT int nvmlDeviceGetSramEccErrorStatus(void *card, struct sram *out) {
    int ret = begin("nvmlDeviceGetSramEccErrorStatus", card);
    if (ret) return ret;
    if (out->version != VERSION(struct sram, 1)) return 25;
    for (int i = 0; i < 11; i++) out->counts[i] = (uint64_t)number("nvmlDeviceGetSramEccErrorStatus", card, 1 + i, i + 1);
    out->exceeded = (uint32_t)number("nvmlDeviceGetSramEccErrorStatus", card, 0, 0);
    return 0;
}
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *card, struct fabric_v3 *out) {
    int ret = begin("nvmlDeviceGetGpuFabricInfoV", card);
    if (ret) return ret;
    int newest = (int)number("newest_fabric", card, 0, 3);
    if (out->version == VERSION(struct fabric_v3, 3) && newest >= 3) out->summary = 1;
    else if (out->version != VERSION(struct fabric_v2, 2)) return 25;
    out->state = (unsigned char)number("nvmlDeviceGetGpuFabricInfoV", card, 0, 3);
    out->status = 0;
    out->mask = 0x51AA;
    return 0;
}
EXPORT int nvmlDeviceGetRetiredPages_v2(void *card, unsigned cause, unsigned *size, uint64_t *out, uint64_t *times) {
    return pages("nvmlDeviceGetRetiredPages_v2", card, cause, size, out, times);
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned *size, struct process *out) {
    return processes("nvmlDeviceGetComputeRunningProcesses_v3", card, size, out);
}
EXPORT int nvmlDeviceGetPdi(void *card, struct pdi *out) {
    int ret = begin("nvmlDeviceGetPdi", card);
    if (ret) return ret;
    if (out->version != VERSION(struct pdi, 1)) return 25;
    out->value = 0xFEDCBA9876543210ull;
    return 0;
}
EXPORT int nvmlDeviceGetRepairStatus(void *card, struct repair *out) {
    int ret = begin("nvmlDeviceGetRepairStatus", card);
    if (ret) return ret;
    if (out->version != VERSION(struct repair, 1)) return 25;
    out->channel = 0;
    out->tpc = 1;
    return 0;
}
EXPORT int nvmlDeviceGetUnrepairableMemoryFlag_v1(void *card, struct unrepairable *out) {
    int ret = begin("nvmlDeviceGetUnrepairableMemoryFlag_v1", card);
    if (ret) return ret;
    if (out->version != VERSION(struct unrepairable, 1)) return 25;
    out->flag = 0;
    return 0;
}
EXPORT int nvmlDeviceGetPlatformInfo(void *card, struct platform *out) {
    int ret = begin("nvmlDeviceGetPlatformInfo", card);
    if (ret) return ret;
    if (out->version != VERSION(struct platform, 2)) return 25;
    memcpy(out->chassis, "1820324000042", 14);
    out->slot = 3;
    out->tray = 11;
    return 0;
}

#endif
