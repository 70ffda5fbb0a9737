/* Shared by the files of the extension: counters in shared memory, sleeping and waking, copies out of other processes.
 *
 * The protocol. Every word that ranks share has one writer, but for `sleepers`, which is only added to. A writer first
 * writes data, then publishes by storing a counter with release order; a reader loads the counter with acquire order
 * and then reads the data. Counters only grow. Nobody waits in here: each call does what can be done now and returns.
 *
 * Sleeping. A rank that means to sleep says so (`sleepers`, `sleeping`), looks once more whether it could go on, and
 * sleeps on its `turn`. A rank that publishes looks after that whether anybody sleeps. The two full fences make sure
 * that one of them sees the other, so that no wake-up is lost.
 */

#ifndef MCRDL_SHM_H
#define MCRDL_SHM_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define LINE 128         /* bytes between words of different writers: caches fetch lines of 64 bytes in pairs */
#define GIL_BYTES 16384  /* calls that move more than this let other threads run */

enum { FLOAT64, FLOAT32, BFLOAT16, FLOAT16, UINT8, INT8, INT16, INT32, INT64, TYPES };
enum { SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR, BXOR, OPS };

typedef void Reduction(void *out, const void *const *in, int n, size_t count);

/* Returns NULL where the type has no such operation. */
Reduction *reduction(int type, int op);

typedef struct {
    _Atomic uint64_t value;
    char apart[LINE - sizeof(uint64_t)];
} Counter;

typedef struct {
    _Atomic uint32_t sleeping; /* threads of the rank that sleep */
    _Atomic uint32_t turn;     /* what it sleeps on */
    char apart[LINE - 2 * sizeof(uint32_t)];
} Bed;

typedef struct {
    _Atomic uint32_t sleepers;
    char apart[LINE - sizeof(uint32_t)];
    Bed beds[];
} Beds;

static inline size_t beds_bytes(int n) { return sizeof(Beds) + (size_t)n * sizeof(Bed); }

static inline uint64_t seen(const Counter *counter) {
    return atomic_load_explicit(&((Counter *)counter)->value, memory_order_acquire);
}

static inline uint64_t own(const Counter *counter) {
    return atomic_load_explicit(&((Counter *)counter)->value, memory_order_relaxed);
}

/* Stores what this rank alone writes; `wake` after it. */
static inline void publish(Counter *counter, uint64_t value) {
    atomic_store_explicit(&counter->value, value, memory_order_release);
}

void wake(Beds *beds, int n, int me);

/* A segment of shared memory as one rank has mapped it, with a lock among this rank's own threads. */
typedef struct {
    char *base;
    size_t bytes;
    int n, me;
    int spins;  /* how often a call looks again before it returns empty-handed; negative: how often it gives its core away */
    bool direct; /* whether ranks can read each other's memory */
    pid_t *pids;
    atomic_flag busy;
    atomic_bool closing;
    atomic_int asleep; /* threads in segment_sleep */
} Segment;

/* Maps the file and takes over neither it nor `pids`, a sequence of ints; false with an exception set on failure. */
bool segment_open(Segment *segment, int fd, size_t bytes, int n, int me, int spins, PyObject *pids);
/* Wakes this rank's sleepers and unmaps; the caller has the lock of the segment and the interpreter's. */
void segment_close(Segment *segment, Beds *beds);
bool segment_lock(Segment *segment);  /* false: another thread is in it */
void segment_enter(Segment *segment); /* waits for it; the caller has the interpreter's lock */
void segment_unlock(Segment *segment);

/* Sleeps until woken, for `limit_s` at the most; `ready` is asked once more before. */
void segment_sleep(Segment *segment, Beds *beds, double limit_s, bool (*ready)(void *), void *argument);

/* Copies from another process; false if that is not allowed or the memory is not there (errno says why). */
bool read_process(pid_t pid, void *to, uint64_t address, size_t bytes);

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

extern PyType_Spec collectives_spec, operation_spec, messages_spec, message_spec;
extern PyTypeObject *operation_type, *message_type;

#endif
