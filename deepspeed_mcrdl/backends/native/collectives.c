/* Collectives of a group whose ranks share a segment.
 *
 * All of them go in rounds. Each rank has `slots` slots of `slot_bytes` in the segment, which it alone writes. In round
 * g of the group a rank first puts (copies a chunk of its data into a free slot, says at place g % slots of its `where`
 * which one that is, then publishes written = g + 1) and then gets (copies or reduces chunks out of the others' slots
 * when their `written` says so, then publishes done = g + 1). A slot, and a place of `where`, is written again only when
 * every rank's `done` has passed the round that used it last. Rounds are counted over the whole life of the group, so
 * nothing is ever reset.
 *
 * A rank puts as far ahead as slots are free: a rank whose core is taken by another process then finds all there is for
 * it in one go, rather than wait for a time slice of the others at every chunk. It takes the first slot that is free, so
 * that as long as the ranks keep pace only the first few are used, and these stay in the caches.
 *
 * An operation takes a number of rounds that all ranks know alike, from sizes that all know; or, where no rank knows all
 * sizes, as many as there turn out to be: each slot says whether its writer has more, and the round in which nobody has
 * is the last. A large operation that only moves data takes one round in which the slots hold addresses, and the data
 * are read from the other process; it is over when all have read.
 *
 * Operations of a group are carried out one after the other in the order in which they were started, which is the same
 * on all ranks. Whoever polls one carries on those before it.
 */

#include <errno.h>
#include <sched.h>
#include <string.h>

#include "shm.h"

typedef struct Operation Operation;

typedef struct {
    PyObject_HEAD
    Segment segment;
    Beds *beds;
    Counter *written, *reduced, *done; /* one a rank */
    char *where_base;
    char *slots_base;
    int slots;
    size_t slot_bytes, direct_bytes;
    uint64_t round;  /* the first round of the operation at the head */
    uint64_t freed;  /* what all ranks' `done` are known to have reached */
    uint64_t *used;  /* for each of this rank's slots, the round after the one that has used it last */
    Operation *head, *tail;
} Collectives;

/* What goes to and comes from one rank. */
typedef struct {
    const char *in;
    size_t in_bytes;
    char *out;
    size_t out_bytes;
} Part;

/* SPREAD: each rank's block goes to all who have a place for it. SPLIT: a block for each pair. FOLD: blocks are reduced
 * by all who want the result. FOLD_SPLIT: each rank reduces its part. ALL_FOLD: so too, and then each part goes to all: a
 * round has a step between put and get, in which a rank reduces its part, writes it to where its slot has no data since
 * they would be for itself, and publishes reduced = g + 1, for which the others wait before they get. */
enum { SPREAD, SPLIT, FOLD, FOLD_SPLIT, ALL_FOLD, BARRIER };

#define FEW 4
#define NEAR 4 /* slots that are used as long as the ranks keep pace */
/* How often a call looks again where it starts: as long as the other rank is late in a loop of short calls, about a
   microsecond. To return empty-handed costs the first rank more than that, in Python. */
#define FIRST_SPINS 50

struct Operation {
    PyObject_HEAD
    Collectives *comm;
    Operation *next;
    PyObject *kept; /* the tensors */
    int kind, error;
    _Atomic bool finished;
    bool open_ended, direct;
    size_t chunk; /* bytes that a pair moves in a round */
    size_t item;
    size_t total; /* bytes of the largest block */
    uint64_t put, fold, get, rounds;
    Reduction *reduce;
    Part *parts, few[FEW];
};

PyTypeObject *operation_type;

/* --- layout --- */

static size_t slot_stride(size_t slot_bytes) { return LINE + rounded_up(slot_bytes, LINE); }

static size_t where_stride(int slots) { return rounded_up((size_t)slots * sizeof(uint32_t), LINE); }

static size_t layout(int n, int slots, size_t slot_bytes) {
    size_t one = 3 * sizeof(Counter) + where_stride(slots) + (size_t)slots * slot_stride(slot_bytes);
    return beds_bytes(n) + (size_t)n * one;
}

/* Which of a rank's slots has a round's data. */
static uint32_t *where(const Collectives *comm, int rank, uint64_t round) {
    char *places = comm->where_base + (size_t)rank * where_stride(comm->slots);
    return (uint32_t *)places + round % (uint64_t)comm->slots;
}

static char *slot(const Collectives *comm, int rank, uint64_t round) {
    size_t index = (size_t)rank * (size_t)comm->slots + *where(comm, rank, round);
    return comm->slots_base + index * slot_stride(comm->slot_bytes) + LINE;
}

/* In front of each slot: whether its writer has more to put after it. */
static uint64_t *more(char *slot) { return (uint64_t *)(slot - LINE); }

/* --- one round --- */

static size_t left(size_t bytes, size_t start, size_t most) {
    return start >= bytes ? 0 : bytes - start < most ? bytes - start : most;
}

static void copy(void *to, const void *from, size_t bytes) {
    if (bytes && to != from) memcpy(to, from, bytes);
}

/* ALL_FOLD: the piece that rank `rank` reduces in a round. */
static size_t piece(const Operation *op, uint64_t k, int rank, size_t *start) {
    size_t n = (size_t)op->comm->segment.n, whole = op->chunk * n, from = whole * k;
    size_t bytes = left(op->total, from, whole);
    size_t each = rounded_up((bytes + n - 1) / n, LINE);
    *start = from + each * (size_t)rank;
    return left(from + bytes, *start, each);
}

/* Whether this rank has data for others in a round. */
static bool has_data(const Operation *op, uint64_t k) {
    if (op->direct || op->open_ended || op->kind == ALL_FOLD) return true;
    const Part *parts = op->parts;
    int n = op->comm->segment.n, me = op->comm->segment.me;
    if (op->kind == SPREAD || op->kind == FOLD) return parts[me].in_bytes > k * op->chunk;
    if (op->kind == BARRIER) return false;
    for (int p = 0; p < n; p++)
        if (p != me && parts[p].in_bytes > k * op->chunk) return true;
    return false;
}

static bool has_more(const Operation *op, uint64_t k) {
    for (int p = 0; p < op->comm->segment.n; p++)
        if (op->parts[p].in_bytes > (k + 1) * op->chunk) return true;
    return false;
}

static bool all_done(Collectives *comm, uint64_t round) {
    if (comm->freed >= round) return true;
    uint64_t least = UINT64_MAX;
    for (int p = 0; p < comm->segment.n; p++) {
        uint64_t done = seen(&comm->done[p]);
        if (done < least) least = done;
    }
    comm->freed = least;
    return least >= round;
}

static uint32_t first_free(const Collectives *comm) {
    uint32_t index = 0;
    while (comm->used[index] > comm->freed) index++;
    return index;
}

/* Takes a slot of this rank for a round and returns it. `may_put` has seen to it that there is one. */
static char *take_slot(Collectives *comm, uint64_t round) {
    uint32_t index = first_free(comm);
    if (index >= NEAR) { /* as far as is known: the others' counters are asked now and then only, which costs time */
        all_done(comm, round);
        index = first_free(comm);
    }
    comm->used[index] = round + 1;
    *where(comm, comm->segment.me, round) = index;
    return slot(comm, comm->segment.me, round);
}

static void put_data(Operation *op, uint64_t k) {
    Collectives *comm = op->comm;
    Part *parts = op->parts;
    int n = comm->segment.n, me = comm->segment.me;
    char *to = take_slot(comm, comm->round + k);
    size_t start = k * op->chunk, bytes;
    if (op->open_ended) *more(to) = has_more(op, k);
    if (op->direct) {
        for (int p = 0; p < n; p++) ((uint64_t *)to)[p] = (uint64_t)(uintptr_t)parts[op->kind == SPREAD ? me : p].in;
    } else if (op->kind == SPREAD || op->kind == FOLD) {
        copy(to, parts[me].in + start, left(parts[me].in_bytes, start, op->chunk));
    } else if (op->kind == SPLIT || op->kind == FOLD_SPLIT) {
        for (int p = 0; p < n; p++)
            if (p != me) copy(to + (size_t)p * op->chunk, parts[p].in + start, left(parts[p].in_bytes, start, op->chunk));
    } else if (op->kind == ALL_FOLD) {
        for (int p = 0; p < n; p++)
            if (p != me) {
                bytes = piece(op, k, p, &start);
                copy(to + (size_t)p * op->chunk, parts[me].out + start, bytes);
            }
    }
}

static void put(Operation *op, uint64_t k) {
    Collectives *comm = op->comm;
    if (has_data(op, k)) put_data(op, k);
    publish(&comm->written[comm->segment.me], comm->round + k + 1);
}

static bool needs(const Operation *op, uint64_t k, int p) {
    if (op->kind == BARRIER || op->open_ended || op->kind == ALL_FOLD) return true;
    if (op->direct) return op->parts[p].out_bytes;
    const Part *own = &op->parts[op->comm->segment.me];
    if (op->kind == FOLD || op->kind == FOLD_SPLIT) return own->out_bytes > k * op->chunk;
    return op->parts[p].out_bytes > k * op->chunk;
}

static bool have_published(Operation *op, uint64_t k, Counter *counters) {
    Collectives *comm = op->comm;
    for (int p = 0; p < comm->segment.n; p++)
        if (p != comm->segment.me && seen(&counters[p]) < comm->round + k + 1 && needs(op, k, p)) return false;
    return true;
}

static bool may_fold(Operation *op) {
    return op->kind == ALL_FOLD && op->fold < op->put && have_published(op, op->fold, op->comm->written);
}

static bool may_get(Operation *op) {
    if (op->kind == ALL_FOLD) return op->get < op->fold && have_published(op, op->get, op->comm->reduced);
    return op->get < op->put && have_published(op, op->get, op->comm->written);
}

static void reduce(Operation *op, char *out, const char *own, size_t offset, size_t bytes, uint64_t round) {
    Collectives *comm = op->comm;
    const void *in[comm->segment.n];
    if (!bytes) return;
    for (int p = 0; p < comm->segment.n; p++)
        in[p] = p == comm->segment.me ? own : slot(comm, p, round) + offset;
    op->reduce(out, in, comm->segment.n, bytes / op->item);
}

static void fold(Operation *op, uint64_t k) {
    Collectives *comm = op->comm;
    int me = comm->segment.me;
    uint64_t round = comm->round + k;
    size_t start, offset = (size_t)me * op->chunk, bytes = piece(op, k, me, &start);
    char *out = op->parts[me].out + start;
    reduce(op, out, out, offset, bytes, round);
    copy(slot(comm, me, round) + offset, out, bytes);
    publish(&comm->reduced[me], round + 1);
}

static void get(Operation *op, uint64_t k) {
    Collectives *comm = op->comm;
    Part *parts = op->parts;
    int n = comm->segment.n, me = comm->segment.me;
    uint64_t round = comm->round + k;
    size_t start = k * op->chunk, bytes;
    if (op->kind == FOLD) {
        reduce(op, parts[me].out + start, parts[me].in + start, 0, left(parts[me].out_bytes, start, op->chunk), round);
    } else if (op->kind == FOLD_SPLIT) {
        bytes = left(parts[me].out_bytes, start, op->chunk);
        reduce(op, parts[me].out + start, parts[me].in + start, (size_t)me * op->chunk, bytes, round);
    } else if (op->kind == ALL_FOLD) {
        for (int p = 0; p < n; p++)
            if (p != me) {
                bytes = piece(op, k, p, &start);
                copy(parts[me].out + start, slot(comm, p, round) + (size_t)p * op->chunk, bytes);
            }
    } else if (op->kind != BARRIER) {
        bool last = true;
        for (int i = 1; i <= n; i++) { /* own part last, others in an order that differs from rank to rank */
            int p = (me + i) % n;
            const char *from = p == me ? parts[me].in + start : slot(comm, p, round);
            if (op->direct && p != me) {
                uint64_t address = ((uint64_t *)slot(comm, p, round))[me];
                if (!read_process(comm->segment.pids[p], parts[p].out, address, parts[p].out_bytes)) op->error = errno;
            } else if (op->direct) {
                copy(parts[me].out, parts[me].in, parts[me].out_bytes);
            } else {
                if (p != me && op->kind == SPLIT) from += (size_t)me * op->chunk;
                copy(parts[p].out + start, from, left(parts[p].out_bytes, start, op->chunk));
            }
            if (op->open_ended) last = last && !*more(slot(comm, p, round));
        }
        if (op->open_ended && last) op->rounds = k + 1;
    }
    publish(&comm->done[me], round + 1);
}

static bool may_put(Operation *op) {
    Collectives *comm = op->comm;
    uint64_t k = op->put, round = comm->round + k, slots = (uint64_t)comm->slots;
    if (op->open_ended ? k > op->get && !has_more(op, k - 1) : k >= op->rounds) return false;
    if (op->open_ended && k >= op->rounds) return false;
    return !has_data(op, k) || round < slots || all_done(comm, round - slots + 1);
}

static bool is_over(Operation *op) {
    if (op->get < op->rounds || op->put < op->rounds) return false;
    return !op->direct || all_done(op->comm, op->comm->round + 1);
}

/* Does what can be done of the operation at the head; returns whether it is over. */
static bool advance(Operation *op) {
    Collectives *comm = op->comm;
    for (bool moved = true; moved;) {
        moved = false;
        if (may_put(op)) {
            put(op, op->put++);
            moved = true;
        }
        if (may_fold(op)) {
            fold(op, op->fold++);
            moved = true;
        }
        if (may_get(op)) {
            get(op, op->get++);
            moved = true;
        }
        if (moved) wake(comm->beds, comm->segment.n, comm->segment.me);
    }
    return is_over(op);
}

/* --- the queue --- */

/* Carries on operations in their order; returns those that are over, linked, for which a reference is owed. */
static Operation *carry_on(Collectives *comm) {
    Operation *over = NULL;
    while (comm->head && advance(comm->head)) {
        Operation *op = comm->head;
        comm->head = op->next;
        if (!comm->head) comm->tail = NULL;
        comm->round += op->rounds;
        op->finished = true;
        op->next = over;
        over = op;
    }
    return over;
}

static void let_go(Operation *over) {
    while (over) {
        Operation *next = over->next;
        Py_CLEAR(over->kept);
        Py_DECREF((PyObject *)over);
        over = next;
    }
}

/* Whether the operation at the head could go on. */
static bool can_move(Collectives *comm) {
    Operation *op = comm->head;
    if (!op) return true;
    return is_over(op) || may_put(op) || may_fold(op) || may_get(op);
}

/* Carries on what can be; looks again `spins` times before it gives up, or if that is negative gives its core away as
   many times between looks. */
static void turn(Collectives *comm, int spins) {
    if (!comm->segment.base || !segment_lock(&comm->segment)) return;
    Operation *over = NULL;
    while (!over && comm->head) {
        while (spins > 0 && !can_move(comm)) {
            relax();
            spins--;
        }
        if (spins < 0 && !can_move(comm)) {
            Py_BEGIN_ALLOW_THREADS;
            for (; spins < 0 && !can_move(comm); spins++) sched_yield();
            Py_END_ALLOW_THREADS;
        }
        if (!can_move(comm)) break;
        if (comm->head->direct || comm->head->total > GIL_BYTES) {
            Py_BEGIN_ALLOW_THREADS;
            over = carry_on(comm);
            segment_unlock(&comm->segment); /* before the interpreter's lock, for which its holder may wait for this */
            Py_END_ALLOW_THREADS;
            let_go(over);
            return;
        }
        over = carry_on(comm);
    }
    segment_unlock(&comm->segment);
    let_go(over);
}

static PyObject *outcome(Operation *op) {
    if (op->finished && op->error) {
        errno = op->error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (!op->finished && !op->comm->segment.base) {
        PyErr_SetString(PyExc_RuntimeError, "the group was left before the operation was done");
        return NULL;
    }
    return PyBool_FromLong(op->finished);
}

static PyObject *operation_poll(PyObject *self, PyObject *Py_UNUSED(nothing)) {
    Operation *op = (Operation *)self;
    if (!op->finished) turn(op->comm, op->comm->segment.spins);
    return outcome(op);
}

static bool awake(void *argument) {
    Operation *op = argument;
    if (!segment_lock(&op->comm->segment)) return true; /* another thread carries on */
    bool ready = op->finished || can_move(op->comm);
    segment_unlock(&op->comm->segment);
    return ready;
}

static PyObject *operation_block(PyObject *self, PyObject *limit) {
    Operation *op = (Operation *)self;
    double limit_s = PyFloat_AsDouble(limit);
    if (PyErr_Occurred()) return NULL;
    if (!op->finished && op->comm->segment.base) {
        Py_BEGIN_ALLOW_THREADS;
        segment_sleep(&op->comm->segment, op->comm->beds, limit_s, awake, op);
        Py_END_ALLOW_THREADS;
    }
    Py_RETURN_NONE;
}

static void operation_dealloc(PyObject *self) {
    Operation *op = (Operation *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(op->kept);
    Py_XDECREF((PyObject *)op->comm);
    if (op->parts != op->few) PyMem_Free(op->parts);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
}

static PyMethodDef operation_methods[] = {
    {"poll", operation_poll, METH_NOARGS, "poll() -> bool: carry it on; whether it is done."},
    {"block", operation_block, METH_O, "block(limit_s): sleep until it may go on, for limit_s at the most."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot operation_slots[] = {
    {Py_tp_dealloc, operation_dealloc},
    {Py_tp_methods, operation_methods},
    {0, NULL},
};

PyType_Spec operation_spec = {
    .name = "deepspeed_mcrdl.backends._shm.Operation",
    .basicsize = sizeof(Operation),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = operation_slots,
};

/* --- starting --- */

static Operation *new_operation(Collectives *comm, int kind, PyObject *kept) {
    if (!comm->segment.base) {
        PyErr_SetString(PyExc_RuntimeError, "the group was left");
        return NULL;
    }
    Operation *op = (Operation *)((allocfunc)PyType_GetSlot(operation_type, Py_tp_alloc))(operation_type, 0);
    if (!op) return NULL;
    int n = comm->segment.n;
    op->parts = n <= FEW ? op->few : PyMem_Calloc((size_t)n, sizeof(Part));
    if (!op->parts) {
        op->parts = op->few;
        Py_DECREF((PyObject *)op);
        PyErr_NoMemory();
        return NULL;
    }
    Py_INCREF((PyObject *)comm);
    op->comm = comm;
    op->kind = kind;
    op->item = 1;
    Py_INCREF(kept);
    op->kept = kept;
    return op;
}

/* Queues the operation and begins it; returns None if it is done already. */
static PyObject *submit(Operation *op, size_t most) {
    Collectives *comm = op->comm;
    size_t n = (size_t)comm->segment.n;
    bool split = op->kind == SPLIT || op->kind == FOLD_SPLIT || op->kind == ALL_FOLD;
    op->chunk = split ? comm->slot_bytes / n / LINE * LINE : comm->slot_bytes;
    if (op->open_ended) {
        op->rounds = UINT64_MAX;
    } else if (op->kind == BARRIER) {
        op->rounds = 1;
    } else if (op->kind == ALL_FOLD) {
        op->rounds = (most + op->chunk * n - 1) / (op->chunk * n);
    } else {
        op->rounds = (most + op->chunk - 1) / op->chunk;
        op->direct = (op->kind == SPREAD || op->kind == SPLIT) && comm->segment.direct && most >= comm->direct_bytes;
        if (op->direct) op->rounds = 1;
    }
    op->total = most;
    Py_INCREF((PyObject *)op); /* the queue's */
    segment_enter(&comm->segment);
    if (comm->tail)
        comm->tail->next = op;
    else
        comm->head = op;
    comm->tail = op;
    segment_unlock(&comm->segment);
    turn(comm, comm->segment.spins > FIRST_SPINS ? FIRST_SPINS : 0);
    if (op->finished && !op->error) {
        Py_DECREF((PyObject *)op);
        Py_RETURN_NONE;
    }
    return (PyObject *)op;
}

static void *address(PyObject *number) { return PyLong_AsVoidPtr(number); }

/* Fills one side of the parts from two sequences of ints. */
static bool fill(Operation *op, PyObject *pointers, PyObject *sizes, bool incoming, size_t *most) {
    for (int p = 0; p < op->comm->segment.n; p++) {
        PyObject *pointer = PySequence_GetItem(pointers, p), *size = PySequence_GetItem(sizes, p);
        Part *part = &op->parts[p];
        size_t bytes = size ? PyLong_AsSize_t(size) : 0;
        void *place = pointer ? address(pointer) : NULL;
        Py_XDECREF(pointer);
        Py_XDECREF(size);
        if (PyErr_Occurred()) return false;
        if (incoming) {
            part->out = place;
            part->out_bytes = bytes;
        } else {
            part->in = place;
            part->in_bytes = bytes;
        }
        if (bytes > *most) *most = bytes;
    }
    return true;
}

#define COLLECTIVE(name) static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t count)
#define EXPECT(number)                                                                                                 \
    if (count != (number)) {                                                                                           \
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");                                                 \
        return NULL;                                                                                                   \
    }
#define START(kind, kept)                                                                                              \
    Operation *op = new_operation((Collectives *)self, kind, kept);                                                    \
    if (!op) return NULL;
#define FINISH_START(most)                                                                                             \
    if (PyErr_Occurred()) {                                                                                            \
        Py_DECREF((PyObject *)op);                                                                                     \
        return NULL;                                                                                                   \
    }                                                                                                                  \
    return submit(op, most);

COLLECTIVE(collectives_barrier) {
    (void)args;
    EXPECT(0)
    START(BARRIER, Py_None)
    FINISH_START(0)
}

COLLECTIVE(collectives_broadcast) { /* address, bytes, root, kept */
    EXPECT(4)
    START(SPREAD, args[3])
    char *data = address(args[0]);
    size_t bytes = PyLong_AsSize_t(args[1]);
    long root = PyLong_AsLong(args[2]);
    if (root == op->comm->segment.me) {
        op->parts[root].in = data;
        op->parts[root].in_bytes = bytes;
    } else if (root >= 0 && root < op->comm->segment.n) {
        op->parts[root].out = data;
        op->parts[root].out_bytes = bytes;
    }
    FINISH_START(bytes)
}

COLLECTIVE(collectives_all_gather) { /* in, out, bytes of a block, kept */
    EXPECT(4)
    START(SPREAD, args[3])
    char *out = address(args[1]);
    size_t bytes = PyLong_AsSize_t(args[2]);
    Part *parts = op->parts, *mine = &parts[op->comm->segment.me];
    mine->in = address(args[0]);
    mine->in_bytes = bytes;
    for (int p = 0; p < op->comm->segment.n; p++) {
        parts[p].out = out + (size_t)p * bytes;
        parts[p].out_bytes = bytes;
    }
    FINISH_START(bytes)
}

COLLECTIVE(collectives_gather) { /* in, bytes, outs, bytes of each, whether all know all sizes, kept */
    EXPECT(6)
    START(SPREAD, args[5])
    Part *mine = &op->parts[op->comm->segment.me];
    mine->in = address(args[0]);
    mine->in_bytes = PyLong_AsSize_t(args[1]);
    size_t most = mine->in_bytes;
    op->open_ended = !PyObject_IsTrue(args[4]);
    fill(op, args[2], args[3], true, &most);
    FINISH_START(most)
}

COLLECTIVE(collectives_all_to_all) { /* in, out, bytes of a block, kept */
    EXPECT(4)
    START(SPLIT, args[3])
    char *in = address(args[0]), *out = address(args[1]);
    size_t bytes = PyLong_AsSize_t(args[2]);
    for (int p = 0; p < op->comm->segment.n; p++)
        op->parts[p] = (Part){in + (size_t)p * bytes, bytes, out + (size_t)p * bytes, bytes};
    FINISH_START(bytes)
}

COLLECTIVE(collectives_exchange) { /* ins, bytes of each, outs, bytes of each, whether all know all sizes, kept */
    EXPECT(6)
    START(SPLIT, args[5])
    size_t most = 0;
    op->open_ended = !PyObject_IsTrue(args[4]);
    if (fill(op, args[0], args[1], false, &most)) fill(op, args[2], args[3], true, &most);
    FINISH_START(most)
}

static bool set_reduction(Operation *op, PyObject *type, PyObject *operation, PyObject *item) {
    op->reduce = reduction((int)PyLong_AsLong(type), (int)PyLong_AsLong(operation));
    op->item = PyLong_AsSize_t(item);
    if (!PyErr_Occurred() && (!op->reduce || !op->item)) PyErr_SetString(PyExc_ValueError, "no such reduction");
    return !PyErr_Occurred();
}

COLLECTIVE(collectives_reduce) { /* address, bytes, type, op, item size, root or -1, bytes that are split, kept */
    EXPECT(8)
    START(FOLD, args[7])
    char *data = address(args[0]);
    size_t bytes = PyLong_AsSize_t(args[1]), split = PyLong_AsSize_t(args[6]);
    long root = PyLong_AsLong(args[5]);
    int me = op->comm->segment.me;
    set_reduction(op, args[2], args[3], args[4]);
    if (root < 0 && op->comm->segment.n > 2 && bytes >= split) op->kind = ALL_FOLD;
    op->parts[me] = (Part){data, root == me ? 0 : bytes, data, root < 0 || root == me ? bytes : 0};
    FINISH_START(bytes)
}

COLLECTIVE(collectives_reduce_scatter) { /* in, out, bytes of a block, type, op, item size, kept */
    EXPECT(7)
    START(FOLD_SPLIT, args[6])
    char *in = address(args[0]);
    size_t bytes = PyLong_AsSize_t(args[2]);
    set_reduction(op, args[3], args[4], args[5]);
    for (int p = 0; p < op->comm->segment.n; p++) {
        op->parts[p].in = in + (size_t)p * bytes;
        op->parts[p].in_bytes = bytes;
    }
    op->parts[op->comm->segment.me].out = address(args[1]);
    op->parts[op->comm->segment.me].out_bytes = bytes;
    FINISH_START(bytes)
}

COLLECTIVE(collectives_reduce_scatter_list) { /* ins, bytes of each, out, type, op, item size, kept */
    EXPECT(7)
    START(FOLD_SPLIT, args[6])
    Part *mine = &op->parts[op->comm->segment.me];
    size_t most = 0;
    set_reduction(op, args[3], args[4], args[5]);
    fill(op, args[0], args[1], false, &most);
    mine->out = address(args[2]);
    mine->out_bytes = mine->in_bytes;
    FINISH_START(most)
}

static PyObject *collectives_close(PyObject *self, PyObject *Py_UNUSED(nothing)) {
    Collectives *comm = (Collectives *)self;
    segment_enter(&comm->segment);
    Operation *over = comm->head;
    comm->head = comm->tail = NULL;
    segment_close(&comm->segment, comm->beds);
    segment_unlock(&comm->segment);
    let_go(over);
    Py_RETURN_NONE;
}

static PyObject *collectives_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    int fd, n, me, slots, spins;
    Py_ssize_t slot_bytes, direct_bytes;
    PyObject *pids;
    if (!PyArg_ParseTuple(args, "iiiinniO", &fd, &me, &n, &slots, &slot_bytes, &direct_bytes, &spins, &pids)) return NULL;
    Collectives *comm = (Collectives *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!comm) return NULL;
    comm->used = PyMem_Calloc((size_t)slots, sizeof(uint64_t));
    if (!comm->used) {
        Py_DECREF((PyObject *)comm);
        return PyErr_NoMemory();
    }
    if (!segment_open(&comm->segment, fd, layout(n, slots, (size_t)slot_bytes), n, me, spins, pids)) {
        Py_DECREF((PyObject *)comm);
        return NULL;
    }
    comm->slots = slots;
    comm->slot_bytes = (size_t)slot_bytes;
    comm->direct_bytes = (size_t)direct_bytes;
    comm->beds = (Beds *)comm->segment.base;
    comm->written = (Counter *)(comm->segment.base + beds_bytes(n));
    comm->reduced = comm->written + n;
    comm->done = comm->reduced + n;
    comm->where_base = (char *)(comm->done + n);
    comm->slots_base = comm->where_base + (size_t)n * where_stride(slots);
    return (PyObject *)comm;
}

static void collectives_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    segment_close(&((Collectives *)self)->segment, ((Collectives *)self)->beds);
    PyMem_Free(((Collectives *)self)->used);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *collectives_size(PyObject *Py_UNUSED(nothing), PyObject *args) {
    int n, slots;
    Py_ssize_t slot_bytes;
    if (!PyArg_ParseTuple(args, "iin", &n, &slots, &slot_bytes)) return NULL;
    return PyLong_FromSize_t(layout(n, slots, (size_t)slot_bytes));
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))collectives_##name, METH_FASTCALL, NULL}

static PyMethodDef collectives_methods[] = {
    METHOD(barrier),
    METHOD(broadcast),
    METHOD(all_gather),
    METHOD(gather),
    METHOD(all_to_all),
    METHOD(exchange),
    METHOD(reduce),
    METHOD(reduce_scatter),
    METHOD(reduce_scatter_list),
    {"close", collectives_close, METH_NOARGS, "close(): let go of the segment; what is not done ends with an error."},
    {"size", collectives_size, METH_VARARGS | METH_STATIC, "size(ranks, slots, slot_bytes) -> bytes of a segment."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot collectives_slots[] = {
    {Py_tp_new, collectives_new},
    {Py_tp_dealloc, collectives_dealloc},
    {Py_tp_methods, collectives_methods},
    {Py_tp_doc, "Collectives(fd, rank, ranks, slots, slot_bytes, direct_bytes, spins, pids or zeros)"},
    {0, NULL},
};

PyType_Spec collectives_spec = {
    .name = "deepspeed_mcrdl.backends._shm.Collectives",
    .basicsize = sizeof(Collectives),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = collectives_slots,
};
