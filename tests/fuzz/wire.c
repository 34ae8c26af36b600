/* Fuzz the reader of responses in `_wire.c`: bytes of a hostile server, in arbitrary pieces.
 *
 * The result of a response must not depend on how it arrives, so each input is read twice: in pieces, and byte by byte.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { WHOLE = 1, REUSED = 2, BUSY = 4, RESET = 8 }; /* the first byte of the input: how the exchange goes */

static const char *arriving; /* the next piece; NULL: the server has closed the connection */
static size_t arriving_size;
static int how;

static ssize_t fake_recv(char *bytes) {
    if (!arriving) {
        errno = ECONNRESET;
        return how & RESET ? -1 : 0;
    }
    memcpy(bytes, arriving, arriving_size);
    return (ssize_t)arriving_size;
}

static ssize_t fake_send(size_t size) {
    if (!(how & BUSY) || size > 2) return how & BUSY ? 2 : (ssize_t)size;
    errno = EAGAIN;
    return -1;
}

#define recv(fd, bytes, size, flags) fake_recv(bytes)
#define send(fd, data, size, flags) fake_send(size)
#define close(fd) 0
#define write(fd, data, size) 0
#include "../../src/powerband/load/_wire.c"

static Request *respond(const char *data, size_t size, size_t piece) {
    Wire wire = {.epoll = -1, .wake = -1, .timer = -1, .bell = -1, .family = -1, .lock = PTHREAD_MUTEX_INITIALIZER};
    Connection *c = calloc(1, sizeof *c);
    Request *request = calloc(1, sizeof *request);
    wire.all = grow(wire.all, &wire.all_room, 1, sizeof *wire.all);
    wire.all[wire.all_size++] = c;
    c->fd = -1, c->served = !!(how & REUSED);
    request->chain = -1, request->whole = how & WHOLE, request->size = 4, request->data = strdup("ping");
    rest(&wire, c);
    start(&wire, request);
    for (size_t at = 0; at < size && !c->dead; at += arriving_size) {
        arriving = data + at;
        arriving_size = piece ? piece : 1 + (unsigned char)data[at] * 7; /* sizes that differ */
        if (arriving_size > size - at) arriving_size = size - at;
        read_some(&wire, c);
    }
    arriving = NULL;
    if (c->idle) request->retried += 2; /* for the comparison: the connection may carry another request */
    if (!c->dead) read_some(&wire, c);
    if (wire.in_flight || wire.silent || wire.all_size || wire.finished_first != request) abort();
    bury(&wire);
    free(wire.all);
    return request;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    how = data[0];
    Request *a = respond((const char *)data + 1, size - 1, 0), *b = respond((const char *)data + 1, size - 1, 1);
    if (a->status != b->status || a->outcome != b->outcome || a->done != b->done || a->count != b->count
        || a->retried != b->retried || a->kept.size != b->kept.size
        || (a->kept.size && memcmp(a->kept.data, b->kept.data, a->kept.size))) {
        fprintf(stderr, "the result depends on the pieces: status %d %d, outcome %d %d, done %d %d, events %zu %zu, kept %zu %zu, "
                "retried %d %d\n", a->status, b->status, a->outcome, b->outcome, a->done, b->done, a->count, b->count,
                a->kept.size, b->kept.size, a->retried, b->retried);
        abort();
    }
    discard(a);
    discard(b);
    return 0;
}
