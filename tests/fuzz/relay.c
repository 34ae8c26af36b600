/* Fuzz the relay in `_relay.c`: bytes of a hostile engine and of a hostile client, in arbitrary pieces.
 *
 * What the client receives must not depend on how the engine's bytes arrive. If the response is cut by a reset, the
 * shorter result is the beginning of the longer one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

/* The first byte of the input: how the exchange goes; the second: how many bytes the client sends. */
enum { SECRETIVE = 1, AUTHORIZED = 2, HANGS = 4, ASKS_AGAIN = 8, SLOW = 16, ENGINE_RESETS = 32, ENGINE_STAYS = 64 };
enum { CLIENT = 1000, ENGINE = 1001 };

typedef struct { char *data; size_t size; int reset; } Received;

static const uint8_t *arriving; /* the next piece; NULL: the peer has closed the connection */
static size_t arriving_size;
static Received *received;
static int how, turn;

static ssize_t fake_recv(int fd, char *bytes) {
    if (!arriving) {
        errno = ECONNRESET;
        return fd == ENGINE && how & ENGINE_RESETS ? -1 : 0;
    }
    memcpy(bytes, arriving, arriving_size);
    return (ssize_t)arriving_size;
}

static ssize_t fake_send(int fd, const char *data, size_t size) {
    if (how & SLOW) {
        errno = EAGAIN;
        if (turn++ % 3 == 0) return -1;
        if (size > 7) size = 7;
    }
    if (fd == CLIENT) {
        received->data = realloc(received->data, received->size + size);
        memcpy(received->data + received->size, data, size);
        received->size += size;
    }
    return (ssize_t)size;
}

static int fake_option(int option) {
    if (option == SO_LINGER) received->reset = 1;
    return 0;
}

#define recv(fd, bytes, size, flags) fake_recv(fd, bytes)
#define send(fd, data, size, flags) fake_send(fd, data, size)
#define setsockopt(fd, level, option, value, size) fake_option(option)
#define epoll_ctl(poller, what, fd, event) ((void)(event))
#define shutdown(fd, how) 0
#define close(fd) 0
#include "../../src/powerband/serve/_relay.c"

static char scratch[READ_SIZE];

static void drain(Pair *pair) { /* both peers read all that is there */
    for (int i = 0; i < 100000 && !pair->dead; i++) {
        if (pair->client.events & EPOLLOUT) handle(&pair->client, EPOLLOUT, scratch);
        else if (pair->engine.fd >= 0 && pair->engine.events & EPOLLOUT) handle(&pair->engine, EPOLLOUT, scratch);
        else return;
    }
    if (!pair->dead) abort();
}

static void deliver(Pair *pair, Side *side, const uint8_t *data, size_t size, size_t piece) {
    for (size_t at = 0; at < size; at += arriving_size) {
        if (!(side->events & EPOLLIN)) drain(pair);
        if (pair->dead || side->fd < 0 || side->shut || !(side->events & EPOLLIN)) return;
        arriving = data + at;
        arriving_size = piece ? piece : 1 + data[at] * 7; /* sizes that differ */
        if (arriving_size > size - at) arriving_size = size - at;
        handle(side, EPOLLIN, scratch);
    }
}

static void hang_up(Pair *pair, Side *side) {
    arriving = NULL;
    drain(pair);
    if (!pair->dead && side->fd >= 0 && side->events & EPOLLIN) handle(side, EPOLLIN, scratch);
    drain(pair);
}

static Received exchange(const uint8_t *data, size_t size, size_t piece) {
    static const char known[] = "GET / HTTP/1.1\r\nX-Powerband-Secret: hush\r\n\r\n";
    size_t asked = data[1] * 4u < size - 2 ? data[1] * 4u : size - 2;
    Received all = {0};
    Pair *pair = calloc(1, sizeof *pair);
    received = &all;
    turn = 0;
    secret = how & SECRETIVE ? "hush" : NULL;
    living = pair;
    pair->client = (Side){.pair = pair, .fd = CLIENT, .events = EPOLLIN};
    pair->engine = (Side){.pair = pair, .fd = ENGINE, .events = EPOLLIN};
    if (how & AUTHORIZED) deliver(pair, &pair->client, (const uint8_t *)known, sizeof known - 1, 0);
    deliver(pair, &pair->client, data + 2, asked, piece);
    deliver(pair, &pair->engine, data + 2 + asked, size - 2 - asked, piece);
    if (how & HANGS && !pair->dead) redirect_waiting(-1);
    if (!(how & ENGINE_STAYS)) hang_up(pair, &pair->engine);
    if (how & ASKS_AGAIN) deliver(pair, &pair->client, (const uint8_t *)known, sizeof known - 1, 0);
    hang_up(pair, &pair->client);
    bury(pair, 0);
    if (living || graveyard != pair) abort();
    graveyard = NULL;
    free(pair->in.data), free(pair->client.out.data), free(pair->engine.out.data), free(pair->asking.data), free(pair);
    return all;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) return 0;
    how = data[0];
    Received one = exchange(data, size, 0), other = exchange(data, size, 1);
    size_t both = one.size < other.size ? one.size : other.size;
    if ((both && memcmp(one.data, other.data, both)) || (one.size != other.size && !one.reset && !other.reset)) {
        fprintf(stderr, "what the client receives depends on the pieces: %zu and %zu bytes\n%.*s\n---\n%.*s\n", one.size,
                other.size, (int)one.size, one.data, (int)other.size, other.data);
        abort();
    }
    free(one.data);
    free(other.data);
    return 0;
}
