/* The relay in front of one engine: it reports an engine crash to the client by means of HTTP, which a proxy cannot do.
 *
 * The relay holds back the response headers until the first body bytes arrive: an engine may send headers while the
 * request is still queued, and Envoy can retry on another replica only before it has seen headers. Chunks are forwarded
 * whole. If the engine closes the connection before the first body bytes, the relay answers with a redirect that Envoy
 * follows by itself: it asks the picker again, which counts the engines that ended. After the first body bytes the relay
 * ends an event stream with an error event and a normal end of the response.
 * It counts the events of a stream and reads the tokens of `usage`, for Envoy's access log: in a trailer after chunks, in
 * a header before a body of known length. With a secret, it closes connections whose request does not have it.
 * SIGUSR1 says that the engine hangs: requests without any body bytes are redirected.
 * One thread, one epoll instance.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_SIZE 65536
#define MOST_UNSENT (1 << 20)
#define MAX_HEAD 65536
#define MAX_CHUNK (8 << 20)
#define MAX_LENGTH (1LL << 40)
#define PAUSE_MS 100
#define TAIL 1024 /* bytes at the end of a response that have its `usage` */
#define USAGE "x-powerband-usage"
#define SECRET "x-powerband-secret"

static const char FAREWELL[] =
    "data: {\"error\": {\"message\": \"the replica died while it was answering\", \"type\": \"api_error\", "
    "\"param\": null, \"code\": \"replica_died\"}}\n\n";

/* The picker reads the path: see router/retries.py. */
#define REDIRECT(path) \
    "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://picker" path "\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
static const char DIED[] = REDIRECT("/died"), UNAVAILABLE[] = REDIRECT("/unavailable");

typedef struct { char *data; size_t start, size, room; } Buffer;

enum { HEAD, LENGTH, CHUNKED, UNTIL_CLOSE };

typedef struct Pair Pair;
typedef struct { Pair *pair; int fd; uint32_t events; int shut; Buffer out; } Side;

struct Pair {
    Side client, engine;
    Buffer in;               /* response bytes not forwarded yet */
    size_t head;             /* size of the held-back response headers at the start of `in` */
    long long left;          /* remaining bytes of a body with Content-Length */
    int state, events, begun, dead;
    int asked;               /* the client has sent a part of a request that has no complete response */
    const char *redirect;    /* to be sent when the request arrives */
    int trusted;             /* the client sent the secret */
    Buffer asking;           /* its first bytes until then */
    long pieces;             /* events of the stream so far */
    char tail[TAIL];         /* the last bytes of the body */
    size_t tailed;
    Pair *before, *after;    /* in the list of all living pairs */
    Pair *next_dead;
};

static int poller = -1;
static const char *secret = NULL;
static Pair *living = NULL, *graveyard = NULL;

static int grow(Buffer *buffer, const char *data, size_t size) {
    if (buffer->start && buffer->start + buffer->size + size > buffer->room) {
        memmove(buffer->data, buffer->data + buffer->start, buffer->size);
        buffer->start = 0;
    }
    if (buffer->start + buffer->size + size > buffer->room) {
        size_t room = buffer->room ? buffer->room : 4096;
        while (room < buffer->start + buffer->size + size) room *= 2;
        char *fresh = realloc(buffer->data, room);
        if (!fresh) return -1;
        buffer->data = fresh;
        buffer->room = room;
    }
    memcpy(buffer->data + buffer->start + buffer->size, data, size);
    buffer->size += size;
    return 0;
}

static void take(Buffer *buffer, size_t size) {
    buffer->start += size;
    buffer->size -= size;
    if (!buffer->size) buffer->start = 0;
}

static void arm(Side *side, uint32_t events) {
    if (side->fd < 0 || side->events == events) return;
    struct epoll_event event = {.events = events, .data.ptr = side};
    epoll_ctl(poller, EPOLL_CTL_MOD, side->fd, &event);
    side->events = events;
}

static void bury(Pair *pair, int reset) {
    if (pair->dead) return;
    pair->dead = 1;
    if (pair->before) pair->before->after = pair->after;
    else living = pair->after;
    if (pair->after) pair->after->before = pair->before;
    if (reset && pair->client.fd >= 0) {
        struct linger now = {1, 0};
        setsockopt(pair->client.fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    }
    if (pair->client.fd >= 0) close(pair->client.fd);
    if (pair->engine.fd >= 0) close(pair->engine.fd);
    pair->client.fd = pair->engine.fd = -1;
    pair->next_dead = graveyard;
    graveyard = pair;
}

/* Send pending output; 0: all sent, or the socket is not writable yet; -1: the peer closed the connection. */
static int flush(Side *side) {
    while (side->out.size) {
        ssize_t sent = send(side->fd, side->out.data + side->out.start, side->out.size, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            return errno == EAGAIN || errno == EINPROGRESS || errno == ENOTCONN ? 0 : -1;
        }
        take(&side->out, (size_t)sent);
    }
    return 0;
}

static void rearm(Pair *pair) {
    if (pair->dead) return;
    if (pair->engine.fd < 0) return;
    arm(&pair->client, (pair->engine.out.size < MOST_UNSENT && !pair->client.shut ? EPOLLIN : 0) | (pair->client.out.size ? EPOLLOUT : 0));
    arm(&pair->engine, (pair->client.out.size < MOST_UNSENT ? EPOLLIN : 0) | (pair->engine.out.size ? EPOLLOUT : 0));
}

static const char *header(const char *head, size_t size, const char *name, size_t *length) {
    size_t wanted = strlen(name);
    const char *line = memchr(head, '\n', size), *end = head + size;
    while (line && ++line < end) {
        const char *next = memchr(line, '\n', (size_t)(end - line));
        if ((size_t)(end - line) > wanted && !strncasecmp(line, name, wanted) && line[wanted] == ':') {
            line += wanted + 1;
            while (line < end && *line == ' ') line++;
            *length = (size_t)((next ? next : end) - line);
            return line;
        }
        line = next;
    }
    return NULL;
}

static int contains(const char *value, size_t size, const char *word) {
    size_t wanted = strlen(word);
    for (; value && size >= wanted; value++, size--)
        if (!strncasecmp(value, word, wanted)) return 1;
    return 0;
}

/* Keep the last bytes of a body, and count the events of a stream. */
static void observe(Pair *pair, const char *body, size_t size) {
    const char *at = body, *end = body + size;
    while ((at = memmem(at, (size_t)(end - at), "data: {", 7))) {
        pair->pieces++;
        at += 7;
    }
    if (size >= TAIL) {
        memcpy(pair->tail, end - TAIL, TAIL);
        pair->tailed = TAIL;
        return;
    }
    size_t kept = pair->tailed + size > TAIL ? TAIL - size : pair->tailed;
    memmove(pair->tail, pair->tail + pair->tailed - kept, kept);
    memcpy(pair->tail + kept, body, size);
    pair->tailed = kept + size;
}

/* Return the number after the last occurrence of a name in the tail; 0: there is none. */
static long number_of(const Pair *pair, const char *name) {
    const char *at = pair->tail, *end = pair->tail + pair->tailed, *last = NULL;
    size_t size = strlen(name);
    while ((at = memmem(at, (size_t)(end - at), name, size))) last = at += size;
    long found = 0;
    while (last && last < end && *last == ' ') last++;
    for (; last && last < end && *last >= '0' && *last <= '9' && found < 1000000000; last++) found = 10 * found + *last - '0';
    return found;
}

/* Write the line with the usage of a response; broken: it ended with an error event. */
static int usage_line(const Pair *pair, char *line, size_t room, int broken) {
    return snprintf(line, room, USAGE ": pieces=%ld prompt=%ld output=%ld broken=%d\r\n", pair->pieces,
                    number_of(pair, "\"prompt_tokens\":"), number_of(pair, "\"completion_tokens\":"), broken);
}

static int pass(Pair *pair, size_t size) {
    if (grow(&pair->client.out, pair->in.data + pair->in.start, size)) return -1;
    take(&pair->in, size);
    return 0;
}

/* Return the number that a text begins with, which a character after its end terminates; -1: none, or over a limit. */
static long long number_in(const char *at, const char *end, int base, long long limit) {
    long long found = -1;
    for (; at < end; at++) {
        int digit = *at >= '0' && *at <= '9' ? *at - '0' : (*at | 32) >= 'a' && (*at | 32) <= 'f' ? (*at | 32) - 'a' + 10 : base;
        if (digit >= base) break;
        found = (found < 0 ? 0 : found) * base + digit;
        if (found > limit) return -1;
    }
    return at == end || memchr(" \t\r;", *at, 4) ? found : -1;
}

/* Parse response headers; 1: complete, 0: more bytes are needed, -1: malformed. */
static int read_head(Pair *pair) {
    char *data = pair->in.data + pair->in.start;
    char *end = memmem(data, pair->in.size, "\r\n\r\n", 4);
    if (!end) return pair->in.size > MAX_HEAD ? -1 : 0;
    size_t size = (size_t)(end - data) + 4, length = 0;
    long long status = size > 12 && !memcmp(data, "HTTP/1.", 7) ? number_in(data + 9, data + size, 10, 999) : -1;
    const char *value;
    if (status < 100) return -1;
    if (status >= 100 && status < 200) return pass(pair, size) ? -1 : 1;
    pair->head = size;
    value = header(data, size, "content-type", &length);
    pair->events = contains(value, length, "text/event-stream");
    value = header(data, size, "transfer-encoding", &length);
    if (contains(value, length, "chunked")) pair->state = CHUNKED;
    else if ((value = header(data, size, "content-length", &length))) {
        pair->state = LENGTH;
        if ((pair->left = number_in(value, value + length, 10, MAX_LENGTH)) < 0) return -1;
    } else if (status == 204 || status == 304) {
        pair->state = LENGTH;
        pair->left = 0;
    } else pair->state = UNTIL_CLOSE;
    return 1;
}

/* Forward all complete parts of the response; -1: malformed response. */
static int digest(Pair *pair) {
    for (;;) {
        if (pair->state == HEAD) {
            int found = pair->in.size ? read_head(pair) : 0;
            if (found <= 0) return found;
            if (pair->state == HEAD) continue;
        }
        char *body = pair->in.data + pair->in.start + pair->head;
        size_t there = pair->in.size - pair->head;
        if (pair->state == LENGTH) {
            if (!there && pair->left) return 0;
            if (pair->head && pair->left <= MAX_CHUNK) { /* whole, so that the headers can have the usage */
                if ((long long)there < pair->left) return 0;
                char line[128];
                pair->pieces = pair->tailed = 0;
                observe(pair, body, (size_t)pair->left);
                pair->pieces = 0;
                int size = usage_line(pair, line, sizeof line, 0);
                size_t rest = pair->head - 2; /* the empty line follows the usage */
                pair->head = 0;
                if (pass(pair, rest) || grow(&pair->client.out, line, (size_t)size)) return -1;
                if (pass(pair, 2 + (size_t)pair->left)) return -1;
                goto complete;
            }
            size_t part = (long long)there < pair->left ? there : (size_t)pair->left;
            if (pass(pair, pair->head + part)) return -1;
            pair->head = 0;
            pair->begun = 1;
            if ((pair->left -= (long long)part)) return 0;
        } else if (pair->state == CHUNKED) {
            char *line = there ? memmem(body, there, "\r\n", 2) : NULL;
            if (!line) return there > 64 ? -1 : 0;
            long long size = number_in(body, line, 16, MAX_CHUNK);
            if (size < 0) return -1;
            size_t whole = (size_t)(line - body) + 2 + (size_t)size + 2;
            if (!size) { /* trailers end with an empty line */
                char *end = memmem(line, there - (size_t)(line - body), "\r\n\r\n", 4), trailer[128];
                if (!end) return there > MAX_HEAD ? -1 : 0;
                whole = (size_t)(end - body) + 4;
                int more = usage_line(pair, trailer, sizeof trailer, 0);
                size_t first = pair->head + (size_t)(line - body) + 2;
                if (pass(pair, first) || grow(&pair->client.out, trailer, (size_t)more)) return -1;
                if (pass(pair, pair->head + whole - first)) return -1;
                goto complete;
            } else if (there < whole) return 0;
            observe(pair, line + 2, (size_t)size);
            if (pass(pair, pair->head + whole)) return -1;
            pair->head = 0;
            pair->begun = 1;
            continue;
        } else {
            if (!there) return 0;
            pair->begun = 1;
            pair->head = 0;
            return pass(pair, pair->in.size);
        }
    complete: /* the connection may carry another response */
        pair->state = HEAD;
        pair->head = pair->tailed = 0;
        pair->begun = pair->asked = 0;
        pair->pieces = 0;
    }
}

/* Without an engine: send what is left, and after a redirect read until the client closes the connection. */
static void end_redirect(Pair *pair) {
    if (flush(&pair->client)) { bury(pair, 1); return; }
    if (!pair->client.out.size && !pair->redirect) shutdown(pair->client.fd, SHUT_WR);
    arm(&pair->client, EPOLLIN | (pair->client.out.size ? EPOLLOUT : 0));
}

/* Answer a request without a response with a redirect; before a request, wait for it: a client expects no answer yet. */
static void redirect(Pair *pair, const char *response) {
    if (pair->engine.fd >= 0) close(pair->engine.fd);
    pair->engine.fd = -1;
    pair->redirect = pair->asked ? NULL : response;
    if (pair->asked && grow(&pair->client.out, response, strlen(response))) bury(pair, 1);
    else end_redirect(pair);
}

/* Handle a connection that the engine closed: end the response with an error event, redirect, or reset the client. */
static void engine_gone(Pair *pair, int error) {
    int idle = pair->state == HEAD && !pair->in.size;
    if (!pair->begun && (pair->asked || error)) {
        redirect(pair, error == ECONNREFUSED ? UNAVAILABLE : DIED);
        return;
    }
    if (pair->begun && pair->state == CHUNKED && pair->events) {
        char frame[sizeof FAREWELL + 160], line[128];
        usage_line(pair, line, sizeof line, 1);
        int size = snprintf(frame, sizeof frame, "%zx\r\n%s\r\n0\r\n%s\r\n", sizeof FAREWELL - 1, FAREWELL, line);
        if (grow(&pair->client.out, frame, (size_t)size)) { bury(pair, 1); return; }
    } else if (!idle && !(pair->state == UNTIL_CLOSE && pair->begun)) {
        bury(pair, 1);
        return;
    }
    if (flush(&pair->client) || !pair->client.out.size) { bury(pair, 0); return; }
    close(pair->engine.fd); /* the rest is sent when the client socket becomes writable */
    pair->engine.fd = -1;
    pair->client.shut = 1;
    arm(&pair->client, EPOLLOUT);
}

static void from_engine(Pair *pair, char *scratch) {
    ssize_t got = recv(pair->engine.fd, scratch, READ_SIZE, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) { engine_gone(pair, got ? errno : 0); return; }
    if (grow(&pair->in, scratch, (size_t)got) || digest(pair) || flush(&pair->client)) bury(pair, 1);
}

/* Return 1 if the request has the secret, 0 if its headers are incomplete, -1 if it must be refused. */
static int authorize(Pair *pair, const char *data, size_t got) {
    if (grow(&pair->asking, data, got)) return -1;
    char *end = memmem(pair->asking.data, pair->asking.size, "\r\n\r\n", 4);
    if (!end) return pair->asking.size > MAX_HEAD ? -1 : 0;
    size_t length = 0, wanted = strlen(secret), different = 0;
    const char *value = header(pair->asking.data, (size_t)(end - pair->asking.data) + 2, SECRET, &length);
    while (value && length && (value[length - 1] == '\r' || value[length - 1] == '\n')) length--;
    if (!value || length != wanted) return -1;
    for (size_t i = 0; i < wanted; i++) different |= (size_t)(value[i] ^ secret[i]); /* as long for each wrong value */
    if (different) return -1;
    pair->trusted = 1;
    return 1;
}

static void from_client(Pair *pair, char *scratch) {
    ssize_t got = recv(pair->client.fd, scratch, READ_SIZE, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) { bury(pair, 0); return; } /* the client disconnected: closing the engine connection aborts the request */
    const char *data = scratch;
    if (secret && !pair->trusted) {
        int trust = authorize(pair, scratch, (size_t)got);
        if (trust < 0) bury(pair, 0);
        if (trust <= 0) return;
        data = pair->asking.data;
        got = (ssize_t)pair->asking.size;
    }
    pair->asked = 1;
    if (pair->engine.fd < 0) { /* redirected: the rest of the request is of no use */
        if (pair->redirect) redirect(pair, pair->redirect);
        return;
    }
    if (grow(&pair->engine.out, data, (size_t)got)) { bury(pair, 1); return; }
    if (flush(&pair->engine)) engine_gone(pair, errno);
}

/* Accept the waiting connections; 1: files or memory are short, and the rest has to wait. */
static int welcome(int listener, const struct sockaddr_in *engine) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) return errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
        int one = 1, up = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        Pair *pair = calloc(1, sizeof *pair);
        if (up < 0 || !pair) { close(fd); if (up >= 0) close(up); free(pair); return 1; }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(up, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        pair->after = living;
        if (living) living->before = pair;
        living = pair;
        pair->client = (Side){.pair = pair, .fd = fd, .events = EPOLLIN};
        pair->engine = (Side){.pair = pair, .fd = up, .events = EPOLLIN};
        if (connect(up, (const struct sockaddr *)engine, sizeof *engine) && errno != EINPROGRESS) { bury(pair, 1); continue; }
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &pair->client};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
        event.data.ptr = &pair->engine;
        epoll_ctl(poller, EPOLL_CTL_ADD, up, &event);
    }
}

/* The engine hangs: redirect the requests that have nothing of a response, so that the picker chooses another replica. */
static void redirect_waiting(int signals) {
    struct signalfd_siginfo received;
    while (read(signals, &received, sizeof received) == sizeof received) continue;
    for (Pair *pair = living, *after; pair; pair = after) {
        after = pair->after;
        if (!pair->begun && pair->engine.fd >= 0) redirect(pair, UNAVAILABLE);
    }
}

/* Handle what epoll reports about one side of a pair. */
static void handle(Side *side, uint32_t events, char *scratch) {
    Pair *pair = side->pair;
    if (pair->dead || side->fd < 0) return;
    if (events & EPOLLOUT && flush(side)) {
        if (side == &pair->engine) engine_gone(pair, errno);
        else bury(pair, 1);
        return;
    }
    if (events & EPOLLOUT && pair->engine.fd < 0 && !pair->client.shut) end_redirect(pair);
    if (pair->dead) return;
    if (side == &pair->client && side->shut) {
        if (!side->out.size || events & (EPOLLERR | EPOLLHUP)) bury(pair, 0);
        return;
    }
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        if (side == &pair->engine) from_engine(pair, scratch);
        else from_client(pair, scratch);
    }
    if (!pair->dead && !pair->client.shut) rearm(pair);
}

static void serve(int listener, const struct sockaddr_in *engine) {
    static char scratch[READ_SIZE];
    struct epoll_event found[256], event = {.events = EPOLLIN, .data.ptr = NULL}, nothing = {.events = 0, .data.ptr = NULL};
    static Side hangs; /* stands for the signal */
    struct epoll_event hung = {.events = EPOLLIN, .data.ptr = &hangs};
    int paused = 0, signals;
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &mask, NULL);
    signals = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC);
    poller = epoll_create1(EPOLL_CLOEXEC);
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    epoll_ctl(poller, EPOLL_CTL_ADD, signals, &hung);
    for (;;) {
        int count = epoll_wait(poller, found, 256, paused ? PAUSE_MS : -1);
        if (paused) {
            epoll_ctl(poller, EPOLL_CTL_MOD, listener, &event);
            paused = 0;
        }
        for (int i = 0; i < count; i++) {
            Side *side = found[i].data.ptr;
            if (!side) {
                /* with too few files the listener stays readable: without a pause the loop would spin */
                if ((paused = welcome(listener, engine))) epoll_ctl(poller, EPOLL_CTL_MOD, listener, &nothing);
                continue;
            }
            if (side == &hangs) { redirect_waiting(signals); continue; }
            handle(side, found[i].events, scratch);
        }
        while (graveyard) {
            Pair *pair = graveyard;
            graveyard = pair->next_dead;
            free(pair->in.data);
            free(pair->client.out.data);
            free(pair->engine.out.data);
            free(pair->asking.data);
            free(pair);
        }
    }
}

static PyObject *run(PyObject *module, PyObject *args) {
    int listener, port;
    struct sockaddr_in engine = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (!PyArg_ParseTuple(args, "ii", &listener, &port)) return NULL;
    engine.sin_port = htons((uint16_t)port);
    secret = getenv("POWERBAND_RELAY_SECRET");
    if (secret && !*secret) secret = NULL;
    Py_BEGIN_ALLOW_THREADS
    serve(listener, &engine);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"run", run, METH_VARARGS, "run(listener_fd, engine_port): relay for ever"}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_relay", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__relay(void) { return PyModule_Create(&definition); }
