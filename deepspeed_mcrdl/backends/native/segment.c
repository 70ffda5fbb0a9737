/* A mapped segment, sleeping in it, and copies out of other processes. */

#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "shm.h"

bool segment_open(Segment *segment, int fd, size_t bytes, int n, int me, int spins, PyObject *pids) {
    segment->pids = PyMem_Malloc(sizeof(pid_t) * (size_t)n);
    if (!segment->pids) {
        PyErr_NoMemory();
        return false;
    }
    for (int i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(pids, i);
        segment->pids[i] = item ? (pid_t)PyLong_AsLong(item) : 0;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return false;
        if (!segment->pids[i]) break;
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return false;
    }
    segment->base = base;
    segment->bytes = bytes;
    segment->n = n;
    segment->me = me;
    segment->spins = spins;
    segment->direct = segment->pids[0] != 0;
    atomic_flag_clear(&segment->busy);
    atomic_init(&segment->closing, false);
    atomic_init(&segment->asleep, 0);
    return true;
}

static void rouse(Bed *bed) {
    atomic_fetch_add_explicit(&bed->turn, 1, memory_order_relaxed);
    syscall(SYS_futex, &bed->turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void segment_close(Segment *segment, Beds *beds) {
    if (segment->base) {
        Py_BEGIN_ALLOW_THREADS;
        atomic_store(&segment->closing, true);
        while (atomic_load(&segment->asleep)) {
            rouse(&beds->beds[segment->me]);
            sched_yield();
        }
        munmap(segment->base, segment->bytes);
        Py_END_ALLOW_THREADS;
    }
    segment->base = NULL;
    PyMem_Free(segment->pids);
    segment->pids = NULL;
}

bool segment_lock(Segment *segment) { return !atomic_flag_test_and_set_explicit(&segment->busy, memory_order_acquire); }

void segment_enter(Segment *segment) {
    while (!segment_lock(segment)) {
        Py_BEGIN_ALLOW_THREADS;
        sched_yield();
        Py_END_ALLOW_THREADS;
    }
}

void segment_unlock(Segment *segment) { atomic_flag_clear_explicit(&segment->busy, memory_order_release); }

void wake(Beds *beds, int n, int me) {
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&beds->sleepers, memory_order_relaxed)) return;
    for (int rank = 0; rank < n; rank++) {
        if (rank == me || !atomic_load_explicit(&beds->beds[rank].sleeping, memory_order_relaxed)) continue;
        rouse(&beds->beds[rank]);
    }
}

void segment_sleep(Segment *segment, Beds *beds, double limit_s, bool (*ready)(void *), void *argument) {
    Bed *bed = &beds->beds[segment->me];
    atomic_fetch_add(&segment->asleep, 1);
    if (atomic_load(&segment->closing)) {
        atomic_fetch_sub(&segment->asleep, 1);
        return;
    }
    atomic_fetch_add_explicit(&beds->sleepers, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&bed->sleeping, 1, memory_order_relaxed);
    uint32_t turn = atomic_load_explicit(&bed->turn, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (!ready(argument)) {
        struct timespec limit = {(time_t)limit_s, (long)((limit_s - (double)(time_t)limit_s) * 1e9)};
        syscall(SYS_futex, &bed->turn, FUTEX_WAIT, turn, &limit, NULL, 0);
    }
    atomic_fetch_sub_explicit(&bed->sleeping, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&beds->sleepers, 1, memory_order_relaxed);
    atomic_fetch_sub(&segment->asleep, 1);
}

bool read_process(pid_t pid, void *to, uint64_t address, size_t bytes) {
    while (bytes) {
        struct iovec here = {to, bytes}, there = {(void *)(uintptr_t)address, bytes};
        ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (got <= 0) {
            if (got < 0 && errno == EINTR) continue;
            if (got == 0) errno = EFAULT;
            return false;
        }
        to = (char *)to + got;
        address += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return true;
}
