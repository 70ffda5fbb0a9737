/* Messages between ranks of one host: for each ordered pair of ranks a ring of bytes that the sender writes.
 *
 * A message goes through the ring in fragments, each behind a header. Whoever drains a ring copies a fragment to where
 * its receive wants it, or, if no receive is there yet, to private memory until one comes; so a ring never stays full
 * while its reader waits in anything. A large message is one header with an address: the receiver reads it out of the
 * sender's memory when its receive is there, and acknowledges it in a table beside the ring.
 *
 * Order: messages of a pair with one tag are received in the order in which they were sent; receives that fit one
 * message get it in the order in which they were started.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "shm.h"

#define ACKS 64 /* large messages of a pair that may be under way */

enum { FIRST, MORE, LARGE };

typedef struct {
    uint64_t total, fragment, tag;
    uint64_t address; /* LARGE */
    uint64_t index;   /* LARGE: how manieth large message of the pair it is, from 1 */
    uint64_t kind;
    uint64_t unused[2];
} Header;

typedef struct {
    Counter head; /* bytes written so far */
    Counter tail; /* bytes read so far */
    _Atomic uint64_t acks[ACKS]; /* by the reader: index of the large message that was read last in this place */
} Ring;

typedef struct Message Message;
typedef struct Messages Messages;

/* A send or a receive of this rank. */
struct Message {
    PyObject_HEAD
    Messages *comm;
    Message *next;
    PyObject *kept;
    char *data;
    uint64_t bytes, tag, moved, index;
    int peer; /* -1: any */
    int error;
    bool sends, large, too_long;
    _Atomic bool finished;
};

/* A message that came before its receive. */
typedef struct Early {
    struct Early *next;
    int source;
    Header header;
    uint64_t arrived;
    char *data;
    bool whole;
} Early;

/* What comes in from one rank: the message of which fragments are still to come, and who gets it. */
typedef struct {
    Message *receive;
    Early *early;
    uint64_t total, arrived;
} Incoming;

typedef struct {
    Message *head, *tail;
} Queue;

struct Messages {
    PyObject_HEAD
    Segment segment;
    Beds *beds;
    char *rings;
    size_t ring_bytes, large_bytes;
    Incoming *incoming;
    Queue *outgoing;  /* by destination: not yet wholly in the ring */
    Queue unread;     /* large messages that nobody has acknowledged */
    Queue receives;   /* without a message so far */
    Early *early, **last_early;
    uint64_t *sent_large;
};

PyTypeObject *message_type;

static size_t ring_stride(size_t ring_bytes) { return sizeof(Ring) + rounded_up(ring_bytes, LINE); }

static size_t layout(int n, size_t ring_bytes) {
    return beds_bytes(n) + (size_t)n * (size_t)n * ring_stride(ring_bytes);
}

static Ring *ring(const Messages *comm, int source, int destination) {
    size_t index = (size_t)source * (size_t)comm->segment.n + (size_t)destination;
    return (Ring *)(comm->rings + index * ring_stride(comm->ring_bytes));
}

static void append(Queue *queue, Message *message) {
    message->next = NULL;
    if (queue->tail)
        queue->tail->next = message;
    else
        queue->head = message;
    queue->tail = message;
}

/* Takes a message out of its queue, whose member before it is `before`, or NULL. */
static void take_out(Queue *queue, Message *before, Message *message) {
    if (before)
        before->next = message->next;
    else
        queue->head = message->next;
    if (queue->tail == message) queue->tail = before;
}

static void finish(Message *message, Message **over) {
    message->finished = true;
    message->next = *over;
    *over = message;
}

/* --- out --- */

static void write_ring(Messages *comm, Ring *to, uint64_t at, const void *from, size_t bytes) {
    char *data = (char *)(to + 1);
    size_t place = at % comm->ring_bytes, first = comm->ring_bytes - place;
    if (!bytes) return;
    if (first > bytes) first = bytes;
    memcpy(data + place, from, first);
    memcpy(data, (const char *)from + first, bytes - first);
}

static void read_ring(Messages *comm, const Ring *from, uint64_t at, void *to, size_t bytes) {
    const char *data = (const char *)(from + 1);
    size_t place = at % comm->ring_bytes, first = comm->ring_bytes - place;
    if (!bytes) return;
    if (first > bytes) first = bytes;
    memcpy(to, data + place, first);
    memcpy((char *)to + first, data, bytes - first);
}

static size_t free_bytes(const Messages *comm, Ring *to) {
    return comm->ring_bytes - (size_t)(own(&to->head) - seen(&to->tail));
}

/* Bytes that a fragment needs free in the ring: all that is left, or an eighth of the ring. */
static size_t wanted(const Messages *comm, const Message *send) {
    size_t rest = (size_t)(send->bytes - send->moved), least = comm->ring_bytes / 8;
    return sizeof(Header) + (send->large ? 0 : rounded_up(rest < least ? rest : least, sizeof(Header)));
}

static bool push(Messages *comm, Message *send) {
    Ring *to = ring(comm, comm->segment.me, send->peer);
    size_t space = free_bytes(comm, to);
    if (space < wanted(comm, send)) return false;
    uint64_t head = own(&to->head);
    size_t rest = (size_t)(send->bytes - send->moved), fragment = space - sizeof(Header);
    if (fragment > comm->ring_bytes / 4) fragment = comm->ring_bytes / 4;
    if (fragment > rest) fragment = rest;
    if (send->large) fragment = 0;
    Header header = {
        .total = send->bytes,
        .fragment = fragment,
        .tag = send->tag,
        .address = (uint64_t)(uintptr_t)send->data,
        .index = send->index,
        .kind = send->large ? LARGE : send->moved ? MORE : FIRST,
    };
    write_ring(comm, to, head, &header, sizeof header);
    write_ring(comm, to, head + sizeof header, send->data + send->moved, fragment);
    send->moved += fragment;
    publish(&to->head, head + sizeof header + rounded_up(fragment, sizeof header));
    return true;
}

static bool push_all(Messages *comm, Message **over) {
    bool moved = false;
    for (int p = 0; p < comm->segment.n; p++) {
        Queue *queue = &comm->outgoing[p];
        while (queue->head && push(comm, queue->head)) {
            Message *send = queue->head;
            moved = true;
            if (!send->large && send->moved < send->bytes) continue;
            take_out(queue, NULL, send);
            if (send->large)
                append(&comm->unread, send);
            else
                finish(send, over);
        }
    }
    Message *before = NULL;
    for (Message *send = comm->unread.head, *next; send; send = next) {
        next = send->next;
        Ring *to = ring(comm, comm->segment.me, send->peer);
        if (atomic_load_explicit(&to->acks[send->index % ACKS], memory_order_acquire) >= send->index) {
            take_out(&comm->unread, before, send);
            finish(send, over);
        } else {
            before = send;
        }
    }
    return moved;
}

/* --- in --- */

static bool fits(const Message *receive, int source, uint64_t tag) {
    return receive->tag == tag && (receive->peer < 0 || receive->peer == source);
}

static Message *take_receive(Messages *comm, int source, const Header *header) {
    Message *before = NULL;
    for (Message *receive = comm->receives.head; receive; before = receive, receive = receive->next)
        if (fits(receive, source, header->tag)) {
            take_out(&comm->receives, before, receive);
            receive->peer = source;
            receive->too_long = header->total > receive->bytes;
            receive->bytes = header->total < receive->bytes ? header->total : receive->bytes;
            return receive;
        }
    return NULL;
}

static void read_large(Messages *comm, Message *receive, const Header *header, Message **over) {
    Ring *from = ring(comm, receive->peer, comm->segment.me);
    if (!read_process(comm->segment.pids[receive->peer], receive->data, header->address, (size_t)receive->bytes))
        receive->error = errno;
    atomic_store_explicit(&from->acks[header->index % ACKS], header->index, memory_order_release);
    finish(receive, over);
}

static Early *keep(Messages *comm, int source, const Header *header) {
    Early *early = malloc(sizeof *early);
    char *data = early && header->kind == FIRST && header->total ? malloc((size_t)header->total) : NULL;
    if (!early || (header->kind == FIRST && header->total && !data)) {
        free(early);
        return NULL;
    }
    *early = (Early){.source = source, .header = *header, .data = data, .whole = header->kind == LARGE};
    *comm->last_early = early;
    comm->last_early = &early->next;
    return early;
}

/* Bytes of a fragment that the receive has room for. */
static size_t room(const Message *receive, uint64_t at, uint64_t fragment) {
    return at >= receive->bytes ? 0 : (size_t)(receive->bytes - at < fragment ? receive->bytes - at : fragment);
}

/* Takes one fragment out of the ring; false if there is none, or no memory to keep it in. */
static bool pull(Messages *comm, int source, Message **over) {
    Ring *from = ring(comm, source, comm->segment.me);
    uint64_t tail = own(&from->tail);
    if (seen(&from->head) == tail) return false;
    Header header;
    Incoming *incoming = &comm->incoming[source];
    read_ring(comm, from, tail, &header, sizeof header);
    if (header.kind != MORE) {
        Message *receive = take_receive(comm, source, &header);
        Early *early = receive ? NULL : keep(comm, source, &header);
        if (!receive && !early) return false;
        if (header.kind == FIRST) *incoming = (Incoming){receive, early, header.total, 0};
        if (header.kind == LARGE && receive) read_large(comm, receive, &header, over);
    }
    if (header.kind != LARGE) {
        uint64_t at = tail + sizeof header;
        if (incoming->receive) {
            size_t bytes = room(incoming->receive, incoming->arrived, header.fragment);
            read_ring(comm, from, at, incoming->receive->data + incoming->arrived, bytes);
        } else {
            read_ring(comm, from, at, incoming->early->data + incoming->arrived, (size_t)header.fragment);
            incoming->early->arrived += header.fragment;
        }
        incoming->arrived += header.fragment;
        if (incoming->arrived == incoming->total) {
            if (incoming->receive)
                finish(incoming->receive, over);
            else
                incoming->early->whole = true;
            *incoming = (Incoming){0};
        }
    }
    publish(&from->tail, tail + sizeof header + rounded_up((size_t)header.fragment, sizeof header));
    return true;
}

/* Gives a receive that has just been started the first message that came before it, if there is one. */
static bool find_early(Messages *comm, Message *receive, Message **over) {
    for (Early **link = &comm->early; *link; link = &(*link)->next) {
        Early *early = *link;
        if (!fits(receive, early->source, early->header.tag)) continue;
        receive->peer = early->source;
        receive->too_long = early->header.total > receive->bytes;
        if (!receive->too_long) receive->bytes = early->header.total;
        if (early->header.kind == LARGE) {
            read_large(comm, receive, &early->header, over);
        } else {
            size_t bytes = room(receive, 0, early->arrived);
            if (bytes) memcpy(receive->data, early->data, bytes);
            if (early->whole)
                finish(receive, over);
            else {
                comm->incoming[early->source].receive = receive;
                comm->incoming[early->source].early = NULL;
            }
        }
        *link = early->next;
        if (comm->last_early == &early->next) comm->last_early = link;
        free(early->data);
        free(early);
        return true;
    }
    return false;
}

/* --- turns --- */

static bool can_move(const Messages *comm) {
    for (int p = 0; p < comm->segment.n; p++) {
        const Ring *from = ring(comm, p, comm->segment.me);
        if (seen(&from->head) != own(&from->tail)) return true;
        const Message *send = comm->outgoing[p].head;
        if (send && free_bytes(comm, ring(comm, comm->segment.me, p)) >= wanted(comm, send)) return true;
    }
    for (const Message *send = comm->unread.head; send; send = send->next) {
        Ring *to = ring(comm, comm->segment.me, send->peer);
        if (atomic_load_explicit(&to->acks[send->index % ACKS], memory_order_acquire) >= send->index) return true;
    }
    return false;
}

/* Whether there may be so much to copy that other threads should run meanwhile. */
static bool is_large(const Messages *comm) {
    if (comm->segment.direct && comm->large_bytes <= GIL_BYTES) return true;
    for (int p = 0; p < comm->segment.n; p++) {
        const Ring *from = ring(comm, p, comm->segment.me);
        const Message *send = comm->outgoing[p].head;
        if (seen(&from->head) - own(&from->tail) > GIL_BYTES || (send && send->bytes > GIL_BYTES)) return true;
    }
    for (const Message *receive = comm->receives.head; receive; receive = receive->next)
        if (receive->bytes > GIL_BYTES) return true;
    return false;
}

static Message *carry_on(Messages *comm) {
    Message *over = NULL;
    for (bool moved = true; moved;) {
        moved = push_all(comm, &over);
        for (int p = 0; p < comm->segment.n; p++)
            while (pull(comm, p, &over)) moved = true;
        if (moved) wake(comm->beds, comm->segment.n, comm->segment.me);
    }
    if (over) wake(comm->beds, comm->segment.n, comm->segment.me); /* acknowledgements */
    return over;
}

static void let_go(Message *over) {
    while (over) {
        Message *next = over->next;
        Py_CLEAR(over->kept);
        Py_DECREF((PyObject *)over);
        over = next;
    }
}

static void turn(Messages *comm, int spins) {
    if (!comm->segment.base || !segment_lock(&comm->segment)) return;
    while (spins > 0 && !can_move(comm)) {
        relax();
        spins--;
    }
    if (!can_move(comm)) {
        segment_unlock(&comm->segment);
        return;
    }
    Message *over;
    if (is_large(comm)) {
        Py_BEGIN_ALLOW_THREADS;
        over = carry_on(comm);
        segment_unlock(&comm->segment); /* before the interpreter's lock, for which its holder may wait for this */
        Py_END_ALLOW_THREADS;
    } else {
        over = carry_on(comm);
        segment_unlock(&comm->segment);
    }
    let_go(over);
}

static PyObject *message_poll(PyObject *self, PyObject *Py_UNUSED(nothing)) {
    Message *message = (Message *)self;
    if (!message->finished) turn(message->comm, message->comm->segment.spins);
    if (!message->finished) {
        if (message->comm->segment.base) Py_RETURN_FALSE;
        PyErr_SetString(PyExc_RuntimeError, "messages have ended before this one was done");
        return NULL;
    }
    if (message->too_long) {
        PyErr_Format(PyExc_ValueError, "the message is longer than the %llu bytes of the tensor that receives it",
                     (unsigned long long)message->bytes);
        return NULL;
    }
    if (message->error) {
        errno = message->error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_TRUE;
}

static bool awake(void *argument) {
    Message *message = argument;
    if (!segment_lock(&message->comm->segment)) return true;
    bool ready = message->finished || can_move(message->comm);
    segment_unlock(&message->comm->segment);
    return ready;
}

static PyObject *message_block(PyObject *self, PyObject *limit) {
    Message *message = (Message *)self;
    double limit_s = PyFloat_AsDouble(limit);
    if (PyErr_Occurred()) return NULL;
    if (!message->finished && message->comm->segment.base) {
        Py_BEGIN_ALLOW_THREADS;
        segment_sleep(&message->comm->segment, message->comm->beds, limit_s, awake, message);
        Py_END_ALLOW_THREADS;
    }
    Py_RETURN_NONE;
}

static PyObject *message_source(PyObject *self, PyObject *Py_UNUSED(nothing)) {
    return PyLong_FromLong(((Message *)self)->peer);
}

static void message_dealloc(PyObject *self) {
    Message *message = (Message *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(message->kept);
    Py_XDECREF((PyObject *)message->comm);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
}

static PyMethodDef message_methods[] = {
    {"poll", message_poll, METH_NOARGS, "poll() -> bool: carry it on; whether it is done."},
    {"block", message_block, METH_O, "block(limit_s): sleep until something may go on, for limit_s at the most."},
    {"source", message_source, METH_NOARGS, "source() -> the rank that a message came from."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot message_slots[] = {
    {Py_tp_dealloc, message_dealloc},
    {Py_tp_methods, message_methods},
    {0, NULL},
};

PyType_Spec message_spec = {
    .name = "deepspeed_mcrdl.backends._shm.Message",
    .basicsize = sizeof(Message),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = message_slots,
};

/* Starts a message: address, bytes, peer (-1: any), tag, kept. */
static PyObject *start(PyObject *self, PyObject *const *args, Py_ssize_t count, bool sends) {
    Messages *comm = (Messages *)self;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
        return NULL;
    }
    if (!comm->segment.base) {
        PyErr_SetString(PyExc_RuntimeError, "messages have ended");
        return NULL;
    }
    Message *message = (Message *)((allocfunc)PyType_GetSlot(message_type, Py_tp_alloc))(message_type, 0);
    if (!message) return NULL;
    Py_INCREF(self);
    message->comm = comm;
    message->data = PyLong_AsVoidPtr(args[0]);
    message->bytes = PyLong_AsSize_t(args[1]);
    message->peer = (int)PyLong_AsLong(args[2]);
    message->tag = PyLong_AsSize_t(args[3]);
    message->sends = sends;
    const bool any = message->peer < 0;
    Py_INCREF(args[4]);
    message->kept = args[4];
    if (!PyErr_Occurred() && (message->peer < (sends ? 0 : -1) || message->peer >= comm->segment.n))
        PyErr_SetString(PyExc_ValueError, "no such rank");
    if (PyErr_Occurred()) {
        Py_DECREF((PyObject *)message);
        return NULL;
    }
    Message *over = NULL;
    Py_INCREF((PyObject *)message); /* the queue's */
    segment_enter(&comm->segment);
    if (sends) {
        Ring *to = ring(comm, comm->segment.me, message->peer);
        uint64_t index = comm->sent_large[message->peer] + 1;
        /* The place of an acknowledgement is free again when the message that used it last was read. */
        message->large = comm->segment.direct && message->bytes >= comm->large_bytes &&
                         (index <= ACKS || atomic_load(&to->acks[index % ACKS]) >= index - ACKS);
        if (message->large) comm->sent_large[message->peer] = message->index = index;
        append(&comm->outgoing[message->peer], message);
    } else if (!find_early(comm, message, &over)) {
        append(&comm->receives, message);
    }
    segment_unlock(&comm->segment);
    if (over) wake(comm->beds, comm->segment.n, comm->segment.me);
    let_go(over);
    turn(comm, 0);
    /* A receive from any rank has to tell whose message it was. */
    if (message->finished && !message->error && !message->too_long && !any) {
        Py_DECREF((PyObject *)message);
        Py_RETURN_NONE;
    }
    return (PyObject *)message;
}

static PyObject *messages_send(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return start(self, args, count, true);
}

static PyObject *messages_recv(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return start(self, args, count, false);
}

static PyObject *messages_turn(PyObject *self, PyObject *Py_UNUSED(nothing)) {
    turn((Messages *)self, 0);
    Py_RETURN_NONE;
}

static void drop(Messages *comm) {
    while (comm->early) {
        Early *next = comm->early->next;
        free(comm->early->data);
        free(comm->early);
        comm->early = next;
    }
    comm->last_early = &comm->early;
    PyMem_Free(comm->incoming);
    PyMem_Free(comm->outgoing);
    PyMem_Free(comm->sent_large);
    comm->incoming = NULL;
    comm->outgoing = NULL;
    comm->sent_large = NULL;
    segment_close(&comm->segment, comm->beds);
}

static PyObject *messages_close(PyObject *self, PyObject *Py_UNUSED(nothing)) {
    Messages *comm = (Messages *)self;
    Message *over = NULL;
    segment_enter(&comm->segment);
    if (comm->segment.base) {
        Queue *queues[] = {&comm->unread, &comm->receives};
        for (int i = 0; i < comm->segment.n + 2; i++) {
            Queue *queue = i < comm->segment.n ? &comm->outgoing[i] : queues[i - comm->segment.n];
            while (queue->head) {
                Message *message = queue->head;
                take_out(queue, NULL, message);
                message->next = over;
                over = message;
            }
            if (i < comm->segment.n && comm->incoming[i].receive) {
                comm->incoming[i].receive->next = over;
                over = comm->incoming[i].receive;
            }
        }
        drop(comm);
    }
    segment_unlock(&comm->segment);
    let_go(over);
    Py_RETURN_NONE;
}

static PyObject *messages_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    int fd, n, me, spins;
    Py_ssize_t ring_bytes, large_bytes;
    PyObject *pids;
    if (!PyArg_ParseTuple(args, "iiinniO", &fd, &me, &n, &ring_bytes, &large_bytes, &spins, &pids)) return NULL;
    Messages *comm = (Messages *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!comm) return NULL;
    comm->last_early = &comm->early;
    comm->incoming = PyMem_Calloc((size_t)n, sizeof(Incoming));
    comm->outgoing = PyMem_Calloc((size_t)n, sizeof(Queue));
    comm->sent_large = PyMem_Calloc((size_t)n, sizeof(uint64_t));
    if (!comm->incoming || !comm->outgoing || !comm->sent_large) PyErr_NoMemory();
    if (PyErr_Occurred() ||
        !segment_open(&comm->segment, fd, layout(n, (size_t)ring_bytes), n, me, spins, pids)) {
        Py_DECREF((PyObject *)comm);
        return NULL;
    }
    comm->ring_bytes = (size_t)ring_bytes;
    comm->large_bytes = (size_t)large_bytes;
    comm->beds = (Beds *)comm->segment.base;
    comm->rings = comm->segment.base + beds_bytes(n);
    return (PyObject *)comm;
}

static void messages_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    drop((Messages *)self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *messages_size(PyObject *Py_UNUSED(nothing), PyObject *args) {
    int n;
    Py_ssize_t ring_bytes;
    if (!PyArg_ParseTuple(args, "in", &n, &ring_bytes)) return NULL;
    return PyLong_FromSize_t(layout(n, (size_t)ring_bytes));
}

static PyMethodDef messages_methods[] = {
    {"send", (PyCFunction)(void (*)(void))messages_send, METH_FASTCALL,
     "send(address, bytes, rank, tag, kept) -> Message, or None if it is on its way already."},
    {"recv", (PyCFunction)(void (*)(void))messages_recv, METH_FASTCALL,
     "recv(address, bytes, rank or -1, tag, kept) -> Message, or None if that of a rank is here already."},
    {"turn", messages_turn, METH_NOARGS, "turn(): carry on all messages."},
    {"close", messages_close, METH_NOARGS, "close(): let go of the segment; what is not done ends with an error."},
    {"size", messages_size, METH_VARARGS | METH_STATIC, "size(ranks, ring_bytes) -> bytes of a segment."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot messages_slots[] = {
    {Py_tp_new, messages_new},
    {Py_tp_dealloc, messages_dealloc},
    {Py_tp_methods, messages_methods},
    {Py_tp_doc, "Messages(fd, rank, ranks, ring_bytes, large_bytes, spins, pids or zeros)"},
    {0, NULL},
};

PyType_Spec messages_spec = {
    .name = "deepspeed_mcrdl.backends._shm.Messages",
    .basicsize = sizeof(Messages),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = messages_slots,
};
