/* The extension module: shared memory between the ranks of one host. */

#include "shm.h"

static const char landmark[] = "deepspeed_mcrdl: another rank may read this";

static PyObject *where(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(nothing)) {
    return PyLong_FromVoidPtr((void *)landmark);
}

static PyObject *can_read(PyObject *Py_UNUSED(self), PyObject *args) {
    int pid;
    unsigned long long address;
    char found[sizeof landmark];
    if (!PyArg_ParseTuple(args, "iK", &pid, &address)) return NULL;
    bool same = read_process(pid, found, address, sizeof found);
    for (size_t i = 0; same && i < sizeof found; i++) same = found[i] == landmark[i];
    return PyBool_FromLong(same);
}

/* What no call between ranks can do without: its bytes into shared memory and as many out of it. */
static PyObject *copy_through(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long source, own, other, target;
    Py_ssize_t size, chunk;
    if (!PyArg_ParseTuple(args, "KKKKnn", &source, &own, &other, &target, &size, &chunk)) return NULL;
    for (Py_ssize_t at = 0; at < size; at += chunk) {
        size_t bytes = (size_t)(size - at < chunk ? size - at : chunk);
        memcpy((void *)(uintptr_t)own, (char *)(uintptr_t)source + at, bytes);
        memcpy((char *)(uintptr_t)target + at, (void *)(uintptr_t)other, bytes);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"where", where, METH_NOARGS, "where() -> address of bytes that can_read looks for."},
    {"can_read", can_read, METH_VARARGS, "can_read(pid, address) -> whether the memory of that process can be read."},
    {"copy_through", copy_through, METH_VARARGS,
     "copy_through(source, own, other, target, bytes, chunk): copy to own and from other, a chunk at a time."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_shm", "Shared memory between the ranks of one host.", -1, methods, NULL, NULL, NULL, NULL,
};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, const char *name) {
    PyObject *type = PyType_FromSpec(spec);
    if (!type) return NULL;
    Py_INCREF(type);
    if (PyModule_AddObject(module, name, type) < 0) return NULL;
    return (PyTypeObject *)type;
}

PyMODINIT_FUNC PyInit__shm(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module || !(operation_type = add_type(module, &operation_spec, "Operation")) ||
        !(message_type = add_type(module, &message_spec, "Message")) ||
        !add_type(module, &collectives_spec, "Collectives") || !add_type(module, &messages_spec, "Messages"))
        return NULL;
    return module;
}
