/* A golden server whose truth is known: the first token TTFT after the request was read, then one every ITL, each on
 * an absolute schedule. What it really did, by its own clock, is written as JSON when it is told to end (SIGTERM).
 *
 * golden PORT TRUTH [ttft_us=50000] [itl_us=20000] [tokens=0] [spread_us=0] [seed=1] [freeze_at_ms=0]
 *        [freeze_for_ms=0] [drop_percent=0] [per_event=1] [lie_tokens=0] [drift_us_per_s=0] [loopback=1]
 * tokens=0: as many as max_tokens says. spread_us: an exponential part of the first token's delay, with that mean.
 * freeze: so long after the first request, nothing moves for so long. drop_percent: answers broken off halfway.
 * per_event: tokens in one event, as under speculation. lie_tokens: added to the usage that is told. drift_us_per_s:
 * what the first token takes longer for every second since the first request. loopback=N: listen on 127.0.0.0 + N.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int fd, busy, drop, chat;
    char *in;
    size_t size, room;
    int64_t read_at, due, tokens, sent, prompt;
    size_t truth;
} Peer;
typedef struct { int64_t read_ns, first_ns, last_ns, end_ns, tokens, planned_ns; } Truth;
typedef struct { int64_t due; Peer *peer; } Slot;

static int64_t ttft_us = 50000, itl_us = 20000, tokens = 0, spread_us = 0, seed = 1, freeze_at_ms = 0,
    freeze_for_ms = 0, drop_percent = 0, per_event = 1, lie_tokens = 0,
    drift_us_per_s = 0, loopback = 1;
static struct { const char *name; int64_t *value; } options[] = {
    {"ttft_us", &ttft_us}, {"itl_us", &itl_us}, {"tokens", &tokens}, {"spread_us", &spread_us}, {"seed", &seed},
    {"freeze_at_ms", &freeze_at_ms}, {"freeze_for_ms", &freeze_for_ms}, {"drop_percent", &drop_percent},
    {"per_event", &per_event}, {"lie_tokens", &lie_tokens}, {"drift_us_per_s", &drift_us_per_s}, {"loopback", &loopback}};
static volatile sig_atomic_t ending;
static Slot *heap;
static size_t heap_size, heap_room, truth_size, truth_room, gap_size, gap_room;
static Truth *truth;
static float *gaps; /* real gaps between two tokens, in microseconds */
static int64_t in_flight, most, area, changed_at, first_request, prompt_total, output_total;
static int frozen;
static int epoll_fd;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
static void on_term(int number) { (void)number; ending = 1; }
static double uniform(void) {
    static uint64_t state;
    if (!state) state = (uint64_t)seed * 0x9E3779B97F4A7C15ULL + 1;
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return ((state * 2685821657736338717ULL >> 11) + 0.5) / 9007199254740992.0;
}
static void *grow(void *data, size_t *room, size_t need, size_t item) {
    if (need <= *room) return data;
    while (*room < need) *room = *room ? *room * 2 : 64;
    return realloc(data, *room * item);
}
static void push(Peer *peer) {
    heap = grow(heap, &heap_room, heap_size + 1, sizeof *heap);
    size_t at = heap_size++;
    for (size_t up; at && heap[up = (at - 1) / 2].due > peer->due; at = up) heap[at] = heap[up];
    heap[at] = (Slot){peer->due, peer};
}
static Peer *pop(void) {
    Peer *top = heap[0].peer;
    Slot last = heap[--heap_size];
    size_t at = 0, down;
    while ((down = 2 * at + 1) < heap_size) {
        if (down + 1 < heap_size && heap[down + 1].due < heap[down].due) down++;
        if (heap[down].due >= last.due) break;
        heap[at] = heap[down];
        at = down;
    }
    heap[at] = last;
    return top;
}
static void count(int step) {
    int64_t now = now_ns();
    area += in_flight * (now - changed_at);
    changed_at = now;
    in_flight += step;
    if (in_flight > most) most = in_flight;
}
static void put(Peer *peer, const char *data, size_t size) {
    while (size) {
        ssize_t n = send(peer->fd, data, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) { usleep(100); continue; }
        if (n <= 0) return;
        data += n, size -= n;
    }
}
static size_t event(char *at, const char *json) {
    size_t size = strlen(json) + 8;
    return sprintf(at, "%zx\r\ndata: %s\n\n\r\n", size, json);
}
static void plain(Peer *peer, const char *body) {
    char text[8192];
    put(peer, text, snprintf(text, sizeof text, "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %zu\r\n\r\n%s",
        strlen(body), body));
}
static void forget(Peer *peer) {
    if (peer->busy) count(-1);
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, peer->fd, NULL);
    close(peer->fd);
    peer->fd = -1;
    for (size_t i = 0; i < heap_size; i++) if (heap[i].peer == peer) { /* leave it: popped when due */ return; }
    free(peer->in);
    free(peer);
}
static void token(Peer *peer) {
    static const char *words[] = {"the", "engine", "works", "best", "in", "its", "power", "band"};
    char out[16384], json[512], piece[256];
    size_t size = 0;
    if (peer->fd < 0) { free(peer->in); free(peer); return; }
    if (!peer->sent) size += sprintf(out, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
    int64_t many = peer->tokens - peer->sent < per_event ? peer->tokens - peer->sent : per_event;
    char *at = piece;
    for (int64_t i = 0; i < many; i++) at += sprintf(at, "%s ", words[(peer->sent + i) % 8]);
    int last = peer->sent + many >= peer->tokens;
    if (peer->drop && peer->sent >= peer->tokens / 2) { shutdown(peer->fd, SHUT_RDWR); forget(peer); return; }
    sprintf(json, peer->chat
        ? "{\"id\":\"chatcmpl-golden\",\"object\":\"chat.completion.chunk\",\"created\":1763190000,\"model\":\"golden\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s\"},\"logprobs\":null,\"finish_reason\":%s}]}"
        : "{\"id\":\"cmpl-golden\",\"object\":\"text_completion\",\"created\":1763190000,\"model\":\"golden\",\"choices\":[{\"index\":0,\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null}]}",
        piece, last ? "\"length\"" : "null");
    size += event(out + size, json);
    if (last) {
        sprintf(json, "{\"id\":\"golden\",\"model\":\"golden\",\"choices\":[],\"usage\":{\"prompt_tokens\":%ld,\"completion_tokens\":%ld,\"total_tokens\":%ld}}",
            (long)peer->prompt, (long)(peer->tokens + lie_tokens), (long)(peer->prompt + peer->tokens + lie_tokens));
        size += event(out + size, json);
        size += sprintf(out + size, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    }
    Truth *t = &truth[peer->truth];
    int64_t when = now_ns();
    if (!peer->sent) t->first_ns = when;
    else {
        gaps = grow(gaps, &gap_room, gap_size + 1, sizeof *gaps);
        gaps[gap_size++] = (when - t->last_ns) / 1e3;
    }
    t->last_ns = when;
    t->tokens = peer->sent += many;
    output_total += many;
    put(peer, out, size);
    if (last) { t->end_ns = now_ns(); peer->busy = 0; count(-1); return; }
    peer->due += itl_us * 1000;
    push(peer);
}
static void begin(Peer *peer, const char *head, const char *body, size_t size) {
    if (strncmp(head, "POST", 4)) {
        char text[4096];
        if (!strncmp(head, "GET /metrics", 12))
            sprintf(text, "# TYPE fake:requests_running gauge\nfake:requests_running %ld\n# TYPE fake:requests_waiting gauge\nfake:requests_waiting 0\n"
                "# TYPE fake:kv_use gauge\nfake:kv_use 0.1\n# TYPE fake:prompt_tokens_total counter\nfake:prompt_tokens_total %ld\n"
                "# TYPE fake:output_tokens_total counter\nfake:output_tokens_total %ld\n# TYPE fake:preemptions_total counter\nfake:preemptions_total 0\n",
                (long)in_flight, (long)prompt_total, (long)output_total);
        else if (!strncmp(head, "GET /v1/models", 14)) strcpy(text, "{\"object\":\"list\",\"data\":[{\"id\":\"golden\",\"object\":\"model\"}]}");
        else strcpy(text, "{\"status\":\"ok\"}");
        plain(peer, text);
        return;
    }
    const char *stream = memmem(body, size, "\"stream\"", 8);
    const char *max = memmem(body, size, "\"max_tokens\"", 12);
    if (!max) max = memmem(body, size, "\"max_completion_tokens\"", 23);
    if (!stream) { plain(peer, "{\"choices\":[{\"index\":0,\"text\":\"ok\",\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}"); return; }
    peer->tokens = tokens ? tokens : max ? atoll(strchr(max, ':') + 1) : 16;
    peer->sent = peer->prompt = 0;
    for (size_t i = 1; i < size; i++) peer->prompt += body[i] == ' ' && body[i - 1] != ' ';
    prompt_total += peer->prompt;
    peer->busy = 1;
    peer->chat = strncmp(head, "POST /v1/chat", 13) == 0;
    peer->drop = drop_percent && uniform() * 100 < drop_percent;
    peer->read_at = now_ns();
    int64_t extra = spread_us ? (int64_t)(-log(uniform()) * spread_us * 1000) : 0;
    if (!first_request) { first_request = peer->read_at; changed_at = first_request; area = 0; }
    extra += drift_us_per_s * ((peer->read_at - first_request) / 1000000);
    peer->due = peer->read_at + ttft_us * 1000 + extra;
    truth = grow(truth, &truth_room, truth_size + 1, sizeof *truth);
    truth[truth_size] = (Truth){.read_ns = peer->read_at, .planned_ns = ttft_us * 1000 + extra};
    peer->truth = truth_size++;
    count(1);
    push(peer);
}
/* Joins the chunks of a body that begins at `head`; returns the bytes that it took, 0 if it is not complete. */
static size_t join(Peer *peer, size_t head, size_t *body) {
    for (int copy = 0; copy < 2; copy++) {
        size_t at = head, to = head, size;
        do {
            char *line = memmem(peer->in + at, peer->size - at, "\r\n", 2);
            if (!line) return 0;
            size = strtoul(peer->in + at, NULL, 16);
            at = line + 2 - peer->in;
            if (peer->size < at + size + 2) return 0;
            if (copy) memmove(peer->in + to, peer->in + at, size);
            to += size, at += size + 2;
        } while (size);
        if (copy) { *body = to - head; return at - head; }
    }
    return 0;
}
static void hear(Peer *peer) {
    peer->in = grow(peer->in, &peer->room, peer->size + 65536, 1);
    ssize_t n = recv(peer->fd, peer->in + peer->size, 65535, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) { forget(peer); return; }
    peer->size += n;
    for (;;) {
        peer->in[peer->size] = 0;
        char *end = memmem(peer->in, peer->size, "\r\n\r\n", 4);
        if (!end) return;
        *end = 0;
        char *length = strcasestr(peer->in, "content-length:");
        size_t body = length ? strtoul(length + 15, NULL, 10) : 0, head = end + 4 - peer->in, taken = body;
        int chunked = strcasestr(peer->in, "transfer-encoding: chunked") != NULL;
        if (chunked ? !(taken = join(peer, head, &body)) : peer->size < head + body) { *end = '\r'; return; }
        begin(peer, peer->in, peer->in + head, body);
        memmove(peer->in, peer->in + head + taken, peer->size - head - taken);
        peer->size -= head + taken;
    }
}
static void tell(const char *path) {
    FILE *file = fopen(path, "w");
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    count(0);
    int64_t until = 0;
    for (size_t i = 0; i < truth_size; i++) if (truth[i].end_ns > until) until = truth[i].end_ns;
    fprintf(file, "{\"most_in_flight\": %ld, \"cpu_s\": %.3f, \"output_tokens\": %ld, \"requests\": [", (long)most,
        use.ru_utime.tv_sec + use.ru_stime.tv_sec + (use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6, (long)output_total);
    for (size_t i = 0; i < truth_size; i++)
        fprintf(file, "%s[%ld,%ld,%ld,%ld]", i ? "," : "", (long)truth[i].read_ns, (long)truth[i].first_ns, (long)truth[i].end_ns, (long)truth[i].tokens);
    fprintf(file, "], \"gaps_us\": [");
    for (size_t i = 0; i < gap_size; i++) fprintf(file, "%s%.0f", i ? "," : "", gaps[i]);
    fprintf(file, "]}\n");
    fclose(file);
}
int main(int argc, char **argv) {
    if (argc < 3) return 2;
    for (int i = 3; i < argc; i++) {
        size_t k, known = sizeof options / sizeof *options;
        for (k = 0; k < known; k++) {
            size_t length = strlen(options[k].name);
            if (!strncmp(argv[i], options[k].name, length) && argv[i][length] == '=') { *options[k].value = atoll(argv[i] + length + 1); break; }
        }
        if (k == known) { fprintf(stderr, "unknown option %s\n", argv[i]); return 2; }
    }
    struct sigaction act = {.sa_handler = on_term};
    sigaction(SIGTERM, &act, NULL);
    sigset_t term, open;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigprocmask(SIG_BLOCK, &term, &open); /* it is let through only while waiting, so it cannot slip in before the wait */
    signal(SIGPIPE, SIG_IGN);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(0x7f000000 + (uint32_t)loopback)};
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096)) { perror("golden"); return 1; }
    epoll_fd = epoll_create1(0);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    static int listener_mark, timer_mark;
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &(struct epoll_event){.events = EPOLLIN, .data.ptr = &listener_mark});
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer, &(struct epoll_event){.events = EPOLLIN, .data.ptr = &timer_mark});
    struct epoll_event events[256];
    while (!ending) {
        int64_t now = now_ns();
        if (freeze_for_ms && first_request && !frozen && now - first_request > freeze_at_ms * 1000000) {
            frozen = 1;
            usleep(freeze_for_ms * 1000);
        }
        int64_t due = heap_size ? heap[0].due : 0;
        if (freeze_for_ms && !frozen && first_request) {
            int64_t at = first_request + freeze_at_ms * 1000000;
            if (!due || at < due) due = at;
        }
        struct itimerspec at = {.it_value = {due / 1000000000, due % 1000000000}};
        timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
        int n = epoll_pwait(epoll_fd, events, 256, -1, &open);
        for (int i = 0; i < n; i++) {
            void *who = events[i].data.ptr;
            if (who == &listener_mark) {
                int fd;
                while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    Peer *peer = calloc(1, sizeof *peer);
                    peer->fd = fd;
                    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = peer});
                }
            } else if (who == &timer_mark) {
                uint64_t times;
                if (read(timer, &times, sizeof times) < 0) { }
            } else hear(who);
        }
        while (heap_size && heap[0].due <= now_ns()) token(pop());
    }
    tell(argv[2]);
    return 0;
}
