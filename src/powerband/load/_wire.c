/* The HTTP client of the load generator: one thread with one epoll instance, no Python in the hot path.
 *
 * Requests are encoded in advance. Each is written at its due time on an open connection. Every read is timestamped
 * with CLOCK_MONOTONIC and split into server-sent events, and events with content are counted. JSON is parsed later,
 * from the few lines that are kept. A response over one of the limits below is broken off: the server is not trusted.
 * `python_wire.py` implements the same interface in Python.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { ANSWERED = 0, BROKEN_OFF = 1, NOT_CONNECTED = 2, CANCELLED = 3 };
enum { HEAD, BODY_LENGTH, BODY_UNTIL_CLOSE, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, COMPLETE };
#define MAX_HEAD 65536
#define MAX_KEPT 8192             /* of the body of an error response */
#define MAX_LINE (8 << 20)
#define MAX_LINES_KEPT (64 << 20) /* bytes of the lines that are kept of one response */
#define MAX_EVENTS (4 << 20)      /* events with content of one response */
#define MAX_LENGTH ((int64_t)1 << 40)
#define READ_SIZE 65536
#define BATCH 256

typedef struct { char *data; size_t size, room; } Buffer;

typedef struct Request {
    int64_t id, due, after, sent, head, first, end, received;
    int32_t chain;
    int status, outcome, whole, done, retried;
    char *data;
    size_t size, written;
    int64_t *times;
    size_t count, room;
    Buffer kept;             /* lines whose JSON is parsed later; all lines if `whole` */
    struct Request *next;
} Request;

typedef struct Connection {
    int fd, connecting, served, state, closing, waits_to_write, extension;
    int64_t left;            /* remaining bytes of the body or chunk */
    Buffer head, line;
    Request *request;
    struct Connection *previous, *following; /* links of the idle list; the dead list uses `following` */
    size_t place;            /* index in `all` */
    int idle, dead;
} Connection;

typedef struct { int64_t due; Request *request; } Slot;
typedef struct { Request *first, *last; int busy; } Chain;

typedef struct {
    PyObject_HEAD
    pthread_t thread;
    int running, ready;
    pthread_mutex_t lock;
    int epoll, wake, timer, bell;
    struct sockaddr_storage address;
    socklen_t address_size;
    int family;
    int64_t limit;           /* maximum number of requests in flight; 0: no limit */
    /* shared between threads, protected by the lock */
    Request *incoming_first, *incoming_last;
    Request *finished_first, *finished_last;
    int stopping, quitting, warm;
    /* read by other threads without the lock */
    volatile int64_t in_flight, silent, worst_wake; /* silent: in flight without a first token */
    /* used only by the event loop */
    Slot *heap;
    size_t heap_size, heap_room;
    Chain *chains;
    size_t chain_room;
    Request *waiting_first, *waiting_last; /* due, but over the limit */
    Connection *idle, *dead;
    Connection **all;
    size_t all_size, all_room;
    int64_t armed;
} Wire;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void *grow(void *data, size_t *room, size_t need, size_t item) {
    if (need <= *room) return data;
    size_t more = *room ? *room : 16;
    while (more < need) more *= 2;
    void *bigger = realloc(data, more * item);
    if (!bigger) abort();
    *room = more;
    return bigger;
}

static void add(Buffer *buffer, const char *data, size_t size) {
    if (!size) return;
    buffer->data = grow(buffer->data, &buffer->room, buffer->size + size, 1);
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
}

static void discard(Request *request) {
    free(request->data);
    free(request->times);
    free(request->kept.data);
    free(request);
}

/* ---- scheduling: a heap by due time ---- */

static void push(Wire *wire, Request *request) {
    wire->heap = grow(wire->heap, &wire->heap_room, wire->heap_size + 1, sizeof(Slot));
    size_t at = wire->heap_size++;
    Slot slot = {request->due, request};
    while (at) {
        size_t above = (at - 1) / 2;
        if (wire->heap[above].due <= slot.due) break;
        wire->heap[at] = wire->heap[above];
        at = above;
    }
    wire->heap[at] = slot;
}

static Request *pop(Wire *wire) {
    Request *top = wire->heap[0].request;
    Slot last = wire->heap[--wire->heap_size];
    size_t at = 0;
    for (;;) {
        size_t below = 2 * at + 1;
        if (below >= wire->heap_size) break;
        if (below + 1 < wire->heap_size && wire->heap[below + 1].due < wire->heap[below].due) below++;
        if (wire->heap[below].due >= last.due) break;
        wire->heap[at] = wire->heap[below];
        at = below;
    }
    if (wire->heap_size) wire->heap[at] = last;
    return top;
}

/* ---- connections ---- */

static void unlist(Wire *wire, Connection *c) {
    if (!c->idle) return;
    if (c->previous) c->previous->following = c->following; else wire->idle = c->following;
    if (c->following) c->following->previous = c->previous;
    c->idle = 0;
}

static void rest(Wire *wire, Connection *c) {
    c->idle = 1;
    c->previous = NULL;
    c->following = wire->idle;
    if (wire->idle) wire->idle->previous = c;
    wire->idle = c;
}

static void hang_up(Wire *wire, Connection *c) {
    unlist(wire, c);
    close(c->fd);
    Connection *last = wire->all[--wire->all_size];
    wire->all[c->place] = last;
    last->place = c->place;
    c->dead = 1; /* a pending event of this epoll_wait may still refer to it */
    c->following = wire->dead;
    wire->dead = c;
}

static void bury(Wire *wire) {
    while (wire->dead) {
        Connection *c = wire->dead;
        wire->dead = c->following;
        free(c->head.data);
        free(c->line.data);
        free(c);
    }
}

static void interest(Wire *wire, Connection *c, int write) {
    if (c->waits_to_write == write) return;
    c->waits_to_write = write;
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | (write ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(wire->epoll, EPOLL_CTL_MOD, c->fd, &event);
}

static Connection *dial(Wire *wire) {
    int fd = socket(wire->family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return NULL;
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(fd, (struct sockaddr *)&wire->address, wire->address_size) && errno != EINPROGRESS) {
        close(fd);
        return NULL;
    }
    Connection *c = calloc(1, sizeof *c);
    if (!c) abort();
    c->fd = fd;
    c->connecting = c->waits_to_write = 1;
    wire->all = grow(wire->all, &wire->all_room, wire->all_size + 1, sizeof *wire->all);
    c->place = wire->all_size;
    wire->all[wire->all_size++] = c;
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLOUT, .data.ptr = c};
    epoll_ctl(wire->epoll, EPOLL_CTL_ADD, fd, &event);
    return c;
}

static void start(Wire *wire, Request *request);

static void finish(Wire *wire, Request *request, int outcome) {
    request->outcome = outcome;
    if (!request->end) request->end = now_ns();
    if (request->sent) wire->in_flight--;
    if (request->sent && !request->first) wire->silent--;
    if (request->chain >= 0) {
        Chain *chain = &wire->chains[request->chain];
        chain->busy = 0;
        if (chain->first && outcome != CANCELLED) {
            Request *next = chain->first;
            if (!(chain->first = next->next)) chain->last = NULL;
            next->next = NULL;
            if (next->due < request->end + next->after) next->due = request->end + next->after;
            chain->busy = 1;
            push(wire, next);
        }
    }
    pthread_mutex_lock(&wire->lock);
    if (wire->finished_last) wire->finished_last->next = request; else wire->finished_first = request;
    wire->finished_last = request;
    pthread_mutex_unlock(&wire->lock);
    uint64_t ring = 1;
    if (write(wire->bell, &ring, sizeof ring) < 0) { }
}

static void release(Wire *wire) { /* start waiting requests while the limit allows */
    while (wire->waiting_first && (!wire->limit || wire->in_flight < wire->limit)) {
        Request *next = wire->waiting_first;
        if (!(wire->waiting_first = next->next)) wire->waiting_last = NULL;
        next->next = NULL;
        start(wire, next);
    }
}

static void lose(Wire *wire, Connection *c) {
    Request *request = c->request;
    int reused = c->served > 0, silent = c->state == HEAD && c->head.size == 0;
    int outcome = c->connecting ? NOT_CONNECTED : BROKEN_OFF;
    c->request = NULL;
    hang_up(wire, c);
    if (!request) return;
    if (reused && silent && !request->retried) { /* the server had closed the idle connection */
        request->retried = 1;
        request->written = 0;
        wire->in_flight--;
        wire->silent--;
        request->sent = 0;
        start(wire, request);
        return;
    }
    finish(wire, request, outcome);
    release(wire);
}

static void send_more(Wire *wire, Connection *c) {
    Request *request = c->request;
    while (request->written < request->size) {
        ssize_t n = send(c->fd, request->data + request->written, request->size - request->written, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN || errno == EWOULDBLOCK) { interest(wire, c, 1); return; }
            if (errno == EINTR) continue;
            lose(wire, c);
            return;
        }
        request->written += n;
    }
    interest(wire, c, 0);
}

static void start(Wire *wire, Request *request) {
    Connection *c = request->retried ? NULL : wire->idle;
    if (c) unlist(wire, c); else c = dial(wire);
    request->sent = now_ns();
    wire->in_flight++;
    wire->silent++;
    if (!c) { finish(wire, request, NOT_CONNECTED); return; }
    c->request = request;
    c->state = HEAD;
    c->head.size = c->line.size = 0;
    c->closing = c->extension = 0;
    if (!c->connecting) send_more(wire, c);
}

/* ---- reading a response ---- */

static int carries_content(const char *line, size_t size) {
    static const char *keys[] = {"\"content\":", "\"text\":", "\"reasoning_content\":", "\"reasoning\":", "\"arguments\":"};
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        const char *at = line, *end = line + size;
        size_t length = strlen(keys[k]);
        while ((at = memmem(at, end - at, keys[k], length))) {
            at += length;
            while (at < end && *at == ' ') at++;
            if (at + 1 < end && at[0] == '"' && at[1] != '"') return 1;
        }
    }
    return 0;
}

static int holds(const char *line, size_t size, const char *key) { /* the key has a value other than null */
    const char *at = memmem(line, size, key, strlen(key)), *end = line + size;
    if (!at) return 0;
    at += strlen(key);
    while (at < end && *at == ' ') at++;
    return at < end && *at != 'n';
}

static int event_line(Wire *wire, Request *request, const char *line, size_t size, int64_t when) { /* 0: over a limit */
    if (size && line[size - 1] == '\r') size--;
    if (size < 5 || memcmp(line, "data:", 5)) {
        if (request->status != 200 && request->kept.size + size < MAX_KEPT) add(&request->kept, line, size);
        return 1;
    }
    line += 5, size -= 5;
    while (size && *line == ' ') line++, size--;
    if (size == 6 && !memcmp(line, "[DONE]", 6)) { request->done = 1; return 1; }
    if (carries_content(line, size)) {
        if (request->count >= MAX_EVENTS) return 0;
        if (!request->first) { request->first = when; wire->silent--; }
        request->times = grow(request->times, &request->room, request->count + 1, sizeof(int64_t));
        request->times[request->count++] = when;
    }
    int keep = request->whole || holds(line, size, "\"usage\":") || holds(line, size, "\"finish_reason\":")
        || holds(line, size, "\"error\":");
    if (keep) {
        if (request->kept.size + size >= MAX_LINES_KEPT) return 0;
        add(&request->kept, line, size);
        add(&request->kept, "\n", 1);
    }
    return 1;
}

static int body(Wire *wire, Connection *c, const char *data, size_t size, int64_t when) { /* 0: over a limit */
    while (size) {
        const char *newline = memchr(data, '\n', size);
        size_t length = newline ? (size_t)(newline - data) : size;
        if (c->line.size + length > MAX_LINE) return 0;
        if (!newline) { add(&c->line, data, size); return 1; }
        if (c->line.size) {
            add(&c->line, data, length);
            if (!event_line(wire, c->request, c->line.data, c->line.size, when)) return 0;
            c->line.size = 0;
        } else if (!event_line(wire, c->request, data, length, when)) return 0;
        data = newline + 1, size -= length + 1;
    }
    return 1;
}

static int64_t decimal(const char *at) { /* the digits of a header's value; -1: it is not a length */
    int64_t found = 0;
    while (*at == ' ' || *at == '\t') at++;
    if (*at < '0' || *at > '9') return -1;
    for (; *at >= '0' && *at <= '9'; at++)
        if ((found = found * 10 + *at - '0') > MAX_LENGTH) return -1;
    while (*at == ' ' || *at == '\t') at++;
    return *at == '\r' ? found : -1;
}

static int read_head(Connection *c) { /* 0: not HTTP; the head ends with an empty line and has no NUL byte */
    Request *request = c->request;
    char *text = c->head.data, *line = strstr(text, "\r\n");
    if (strncmp(text, "HTTP/1.", 7) || !text[7] || text[8] != ' ') return 0;
    for (int i = 9; i < 12; i++)
        if (text[i] < '0' || text[i] > '9') return 0;
    request->status = atoi(text + 9);
    int chunked = 0;
    int64_t length = -1;
    c->closing = !strncmp(text, "HTTP/1.0", 8);
    for (; line && line[2] != '\r'; line = strstr(line + 2, "\r\n")) {
        char *at = line + 2;
        if (!strncasecmp(at, "content-length:", 15)) {
            if ((length = decimal(at + 15)) < 0) return 0;
        } else if (!strncasecmp(at, "transfer-encoding:", 18)) {
            char *end = strstr(at, "\r\n");
            chunked = memmem(at, end - at, "chunked", 7) != NULL;
        } else if (!strncasecmp(at, "connection:", 11)) {
            char *value = at + 11;
            while (*value == ' ') value++;
            if (!strncasecmp(value, "close", 5)) c->closing = 1;
        }
    }
    c->left = -1; /* no digit of a chunk's size yet */
    if (chunked) c->state = CHUNK_SIZE;
    else if (length >= 0) { c->left = length; c->state = length ? BODY_LENGTH : COMPLETE; }
    else { c->state = BODY_UNTIL_CLOSE; c->closing = 1; }
    return 1;
}

static int take(Wire *wire, Connection *c, const char *data, size_t size, int64_t when) { /* 0: not HTTP, or over a limit */
    while (size && c->state != COMPLETE) {
        size_t step;
        switch (c->state) {
        case HEAD: {
            size_t before = c->head.size;
            add(&c->head, data, size);
            add(&c->head, "", 1);
            c->head.size--;
            size_t from = before > 3 ? before - 3 : 0;
            char *end = memmem(c->head.data + from, c->head.size - from, "\r\n\r\n", 4);
            if (!end) return c->head.size <= MAX_HEAD;
            step = end + 4 - c->head.data - before;
            end[4] = 0;
            if (before + step > MAX_HEAD || strlen(c->head.data) != before + step || !read_head(c)) return 0;
            data += step, size -= step;
            break;
        }
        case BODY_LENGTH:
            step = (int64_t)size < c->left ? size : (size_t)c->left;
            if (!body(wire, c, data, step, when)) return 0;
            data += step, size -= step;
            if (!(c->left -= step)) c->state = COMPLETE;
            break;
        case BODY_UNTIL_CLOSE:
            return body(wire, c, data, size, when);
        case CHUNK_SIZE: {
            char digit = *data++;
            int value = digit >= '0' && digit <= '9' ? digit - '0'
                : (digit | 32) >= 'a' && (digit | 32) <= 'f' ? (digit | 32) - 'a' + 10 : -1;
            size--;
            if (digit == '\n') {
                if (c->left < 0) return 0;
                c->state = c->left ? CHUNK_DATA : TRAILER;
                c->extension = 0;
            } else if (c->extension || (c->left >= 0 && digit == ';')) c->extension = 1; /* skip chunk extensions */
            else if (value >= 0) {
                if (c->left < 0) c->left = 0;
                if ((c->left = c->left * 16 + value) > MAX_LENGTH) return 0;
            } else if (digit != '\r' && digit != ' ') return 0;
            break;
        }
        case CHUNK_DATA:
            step = (int64_t)size < c->left ? size : (size_t)c->left;
            if (!body(wire, c, data, step, when)) return 0;
            data += step, size -= step;
            if (!(c->left -= step)) c->state = CHUNK_END;
            break;
        case CHUNK_END:
            if (*data == '\n') { c->state = CHUNK_SIZE; c->left = -1; }
            else if (*data != '\r') return 0;
            data++, size--;
            break;
        case TRAILER: /* an empty line ends the response */
            if (*data == '\n') { if (!c->left) c->state = COMPLETE; c->left = 0; }
            else if (*data != '\r') c->left = 1;
            data++, size--;
            break;
        }
    }
    if (size) c->closing = 1; /* bytes after the response: nobody asked for them */
    return 1;
}

static void answered(Wire *wire, Connection *c, int64_t when) {
    Request *request = c->request;
    if (c->line.size) event_line(wire, request, c->line.data, c->line.size, when);
    request->end = when;
    c->request = NULL;
    c->served++;
    if (c->closing || request->written < request->size) hang_up(wire, c);
    else rest(wire, c);
    finish(wire, request, ANSWERED);
    release(wire);
}

static void read_some(Wire *wire, Connection *c) {
    static __thread char bytes[READ_SIZE];
    ssize_t n = recv(c->fd, bytes, READ_SIZE, 0);
    int64_t when = now_ns();
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (n <= 0 || !c->request) {
        if (n == 0 && c->request && c->state == BODY_UNTIL_CLOSE) { answered(wire, c, when); return; }
        lose(wire, c);
        return;
    }
    c->request->received += n;
    if (!c->request->head) c->request->head = when;
    if (!take(wire, c, bytes, n, when)) { c->closing = 1; lose(wire, c); return; }
    if (c->state == COMPLETE) answered(wire, c, when);
}

static void connected(Wire *wire, Connection *c) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) { lose(wire, c); return; }
    c->connecting = 0;
    if (c->request) send_more(wire, c);
    else { interest(wire, c, 0); rest(wire, c); }
}

/* ---- event loop ---- */

static void accept_incoming(Wire *wire) {
    uint64_t count;
    if (read(wire->wake, &count, sizeof count) < 0) { }
    pthread_mutex_lock(&wire->lock);
    Request *request = wire->incoming_first;
    wire->incoming_first = wire->incoming_last = NULL;
    int warm = wire->warm;
    wire->warm = 0;
    pthread_mutex_unlock(&wire->lock);
    while (warm-- > 0 && dial(wire)) { }
    while (request) {
        Request *next = request->next;
        request->next = NULL;
        if (request->chain >= 0) {
            size_t before = wire->chain_room;
            wire->chains = grow(wire->chains, &wire->chain_room, request->chain + 1, sizeof(Chain));
            if (wire->chain_room > before)
                memset(wire->chains + before, 0, (wire->chain_room - before) * sizeof(Chain));
            Chain *chain = &wire->chains[request->chain];
            if (chain->busy) {
                if (chain->last) chain->last->next = request; else chain->first = request;
                chain->last = request;
                request = next;
                continue;
            }
            chain->busy = 1;
        }
        push(wire, request);
        request = next;
    }
}

static void cancel_all(Wire *wire) {
    while (wire->heap_size) finish(wire, pop(wire), CANCELLED);
    Request *request;
    while ((request = wire->waiting_first)) {
        wire->waiting_first = request->next;
        request->next = NULL;
        finish(wire, request, CANCELLED);
    }
    wire->waiting_last = NULL;
    for (size_t i = 0; i < wire->chain_room; i++)
        while ((request = wire->chains[i].first)) {
            wire->chains[i].first = request->next;
            request->next = NULL;
            request->chain = -1;
            finish(wire, request, CANCELLED);
        }
    for (size_t i = 0; i < wire->chain_room; i++) wire->chains[i].last = NULL;
    while (wire->all_size) {
        Connection *c = wire->all[0];
        request = c->request;
        hang_up(wire, c);
        if (request) finish(wire, request, CANCELLED);
    }
}

static void send_due(Wire *wire) {
    while (wire->heap_size) {
        int64_t now = now_ns();
        if (wire->heap[0].due > now) return;
        Request *request = pop(wire);
        if (wire->limit && wire->in_flight >= wire->limit) {
            if (wire->waiting_last) wire->waiting_last->next = request; else wire->waiting_first = request;
            wire->waiting_last = request;
        } else start(wire, request);
    }
}

static void set_timer(Wire *wire) {
    int64_t due = wire->heap_size ? wire->heap[0].due : 0;
    if (due == wire->armed) return;
    wire->armed = due;
    if (due && due < 1) due = 1;
    struct itimerspec at = {.it_value = {due / 1000000000, due % 1000000000}};
    timerfd_settime(wire->timer, TFD_TIMER_ABSTIME, &at, NULL);
}

static void *loop(void *self) {
    Wire *wire = self;
    struct epoll_event events[BATCH];
    for (;;) {
        set_timer(wire);
        int n = epoll_wait(wire->epoll, events, BATCH, -1);
        int64_t woken = now_ns();
        if (wire->armed && woken > wire->armed && woken - wire->armed > wire->worst_wake)
            wire->worst_wake = woken - wire->armed;
        for (int i = 0; i < n; i++) {
            void *source = events[i].data.ptr;
            if (source == &wire->wake) accept_incoming(wire);
            else if (source == &wire->timer) {
                uint64_t count;
                if (read(wire->timer, &count, sizeof count) < 0) { }
                wire->armed = 0;
            }
        }
        pthread_mutex_lock(&wire->lock);
        int stop = wire->stopping, quit = wire->quitting;
        pthread_mutex_unlock(&wire->lock);
        if (stop || quit) {
            cancel_all(wire);
            pthread_mutex_lock(&wire->lock);
            wire->stopping = 0;
            pthread_mutex_unlock(&wire->lock);
            bury(wire);
            if (quit) return NULL;
            continue; /* the connections of these events are closed */
        }
        send_due(wire); /* send due requests before reading responses */
        for (int i = 0; i < n; i++) {
            Connection *c = events[i].data.ptr;
            if ((void *)c == &wire->wake || (void *)c == &wire->timer) continue;
            if (c->dead) continue;
            if (c->connecting) {
                if (events[i].events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) connected(wire, c);
            } else if (events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLERR | EPOLLHUP)) read_some(wire, c);
            else if (events[i].events & EPOLLOUT && c->request) send_more(wire, c);
        }
        bury(wire);
    }
}

/* ---- Python interface ---- */

static int64_t thread_cpu_ns(Wire *wire) {
    clockid_t clock;
    struct timespec t;
    if (!wire->running || pthread_getcpuclockid(wire->thread, &clock) || clock_gettime(clock, &t)) return 0;
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void watch(Wire *wire, int fd, void *mark) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = mark};
    epoll_ctl(wire->epoll, EPOLL_CTL_ADD, fd, &event);
}

static int Wire_init(PyObject *object, PyObject *args, PyObject *keywords) {
    Wire *wire = (Wire *)object;
    static char *names[] = {"host", "port", "limit", NULL};
    const char *host, *port;
    long long limit = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "ss|L", names, &host, &port, &limit)) return -1;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV}, *found;
    if (getaddrinfo(host, port, &hints, &found)) {
        PyErr_Format(PyExc_ValueError, "not a numeric address: %s port %s", host, port);
        return -1;
    }
    memcpy(&wire->address, found->ai_addr, found->ai_addrlen);
    wire->address_size = found->ai_addrlen;
    wire->family = found->ai_family;
    freeaddrinfo(found);
    wire->limit = limit;
    pthread_mutex_init(&wire->lock, NULL);
    wire->epoll = epoll_create1(EPOLL_CLOEXEC);
    wire->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    wire->bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    wire->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    wire->ready = 1;
    if (wire->epoll < 0 || wire->wake < 0 || wire->bell < 0 || wire->timer < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    watch(wire, wire->wake, &wire->wake);
    watch(wire, wire->timer, &wire->timer);
    if (pthread_create(&wire->thread, NULL, loop, wire)) {
        PyErr_SetString(PyExc_OSError, "cannot create the sender thread");
        return -1;
    }
    wire->running = 1;
    return 0;
}

static void ring(int fd) {
    uint64_t one = 1;
    if (write(fd, &one, sizeof one) < 0) { }
}

static PyObject *Wire_submit(PyObject *object, PyObject *args) {
    Wire *wire = (Wire *)object;
    long long id, due, after;
    int chain, whole;
    const char *data;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "LLy#iLp", &id, &due, &data, &size, &chain, &after, &whole)) return NULL;
    Request *request = calloc(1, sizeof *request);
    if (!request || !(request->data = malloc(size))) { free(request); return PyErr_NoMemory(); }
    memcpy(request->data, data, size);
    request->size = size;
    request->id = id, request->due = due, request->chain = chain, request->after = after, request->whole = whole;
    pthread_mutex_lock(&wire->lock);
    int first = !wire->incoming_first;
    if (wire->incoming_last) wire->incoming_last->next = request; else wire->incoming_first = request;
    wire->incoming_last = request;
    pthread_mutex_unlock(&wire->lock);
    if (first) ring(wire->wake);
    Py_RETURN_NONE;
}

static PyObject *Wire_warm(PyObject *object, PyObject *args) {
    Wire *wire = (Wire *)object;
    int count;
    if (!PyArg_ParseTuple(args, "i", &count)) return NULL;
    pthread_mutex_lock(&wire->lock);
    wire->warm += count;
    pthread_mutex_unlock(&wire->lock);
    ring(wire->wake);
    Py_RETURN_NONE;
}

static PyObject *describe(Request *r) {
    return Py_BuildValue("(LLLLLLiiiiLy#y#)", (long long)r->id, (long long)r->due, (long long)r->sent,
        (long long)r->head, (long long)r->first, (long long)r->end, r->status, r->outcome, r->done, r->retried, (long long)r->received,
        r->count ? (char *)r->times : "", (Py_ssize_t)(r->count * sizeof(int64_t)), r->kept.size ? r->kept.data : "",
        (Py_ssize_t)r->kept.size);
}

static PyObject *Wire_collect(PyObject *object, PyObject *args) {
    Wire *wire = (Wire *)object;
    double seconds;
    if (!PyArg_ParseTuple(args, "d", &seconds)) return NULL;
    Request *request;
    Py_BEGIN_ALLOW_THREADS
    struct pollfd bell = {.fd = wire->bell, .events = POLLIN};
    poll(&bell, 1, (int)(seconds * 1000));
    uint64_t count;
    if (read(wire->bell, &count, sizeof count) < 0) { }
    pthread_mutex_lock(&wire->lock);
    request = wire->finished_first;
    wire->finished_first = wire->finished_last = NULL;
    pthread_mutex_unlock(&wire->lock);
    Py_END_ALLOW_THREADS
    PyObject *list = PyList_New(0);
    while (request) {
        Request *next = request->next;
        PyObject *one = list ? describe(request) : NULL;
        if (one) PyList_Append(list, one);
        Py_XDECREF(one);
        discard(request);
        request = next;
    }
    if (PyErr_Occurred()) { Py_XDECREF(list); return NULL; }
    return list;
}

static PyObject *Wire_stop(PyObject *object, PyObject *unused) {
    Wire *wire = (Wire *)object;
    pthread_mutex_lock(&wire->lock);
    wire->stopping = 1;
    pthread_mutex_unlock(&wire->lock);
    ring(wire->wake);
    Py_RETURN_NONE;
}

static void shut(Wire *wire) {
    if (wire->running) {
        pthread_mutex_lock(&wire->lock);
        wire->quitting = 1;
        pthread_mutex_unlock(&wire->lock);
        ring(wire->wake);
        pthread_join(wire->thread, NULL);
        wire->running = 0;
    }
    if (!wire->ready) return;
    wire->ready = 0;
    for (Request *r = wire->finished_first, *next; r; r = next) { next = r->next; discard(r); }
    for (Request *r = wire->incoming_first, *next; r; r = next) { next = r->next; discard(r); }
    wire->finished_first = wire->incoming_first = NULL;
    free(wire->heap), free(wire->chains), free(wire->all);
    close(wire->epoll), close(wire->wake), close(wire->bell), close(wire->timer);
    pthread_mutex_destroy(&wire->lock);
}

static PyObject *Wire_close(PyObject *object, PyObject *unused) {
    Py_BEGIN_ALLOW_THREADS
    shut((Wire *)object);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *Wire_state(PyObject *object, PyObject *unused) {
    Wire *wire = (Wire *)object;
    return Py_BuildValue("{s:L,s:L,s:L,s:L}", "in_flight", (long long)wire->in_flight, "silent",
        (long long)wire->silent, "worst_wake_ns", (long long)wire->worst_wake, "cpu_ns",
        (long long)thread_cpu_ns(wire));
}

static void Wire_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    shut((Wire *)object);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef Wire_methods[] = {
    {"submit", Wire_submit, METH_VARARGS, "submit(id, due_ns, data, chain, after_ns, whole)"},
    {"warm", Wire_warm, METH_VARARGS, "warm(count): open this many idle connections"},
    {"collect", Wire_collect, METH_VARARGS, "collect(seconds): requests that have ended; waits at most this long"},
    {"stop", Wire_stop, METH_NOARGS, "stop(): cancel all unanswered requests"},
    {"state", Wire_state, METH_NOARGS, "state(): requests in flight, worst wake-up delay, CPU time"},
    {"close", Wire_close, METH_NOARGS, "close(): cancel all requests and end the thread"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot Wire_slots[] = {
    {Py_tp_doc, "A thread that sends requests and reads responses."},
    {Py_tp_init, Wire_init},
    {Py_tp_dealloc, Wire_dealloc},
    {Py_tp_methods, Wire_methods},
    {0, NULL}};

static PyType_Spec Wire_spec = {"powerband.load._wire.Wire", sizeof(Wire), 0, Py_TPFLAGS_DEFAULT, Wire_slots};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_wire", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__wire(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    PyObject *type = PyType_FromSpec(&Wire_spec);
    if (!type || PyModule_AddObject(module, "Wire", type)) { Py_DECREF(module); return NULL; }
    return module;
}
