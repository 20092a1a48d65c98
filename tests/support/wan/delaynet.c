/* An emulated WAN in user space, for network namespaces of one Linux machine.
 *
 * Opens one TUN device per host and switches IPv4 packets between them by their destination.
 * Every host has a rate per direction, a one-way delay (that of a pair is the sum of both) and
 * a finite buffer: what would wait for longer is dropped, as routers do.
 *
 *   delaynet BUFFER_MS NAME:IP:UP_MBIT:DOWN_MBIT:DELAY_MS ...
 *
 * Says "ready" when the devices are there. Then obeys orders on standard input, one a line, and
 * answers each with "ok" or "error: ...":
 *
 *   rate NAME UP_MBIT DOWN_MBIT     delay NAME MS     cut NAME NAME     heal NAME NAME     stats
 *
 * "stats" answers with one line per host before the "ok". Ends on SIGTERM, SIGINT, or when there
 * are no more orders.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define MAX_HOSTS 64
#define MAX_PACKET_BYTES 65536
#define MAX_BURST 64 /* packets from one host before the others' turn */
#define BYTES_PER_MBIT 125000.0
#define LONGEST_WAIT_S 0.05

typedef struct Packet {
    struct Packet *next;
    double due_at; /* seconds on the monotonic clock, as all instants here */
    int length;
    unsigned char bytes[];
} Packet;

typedef struct {
    char name[IFNAMSIZ];
    uint32_t ip;                     /* in network order */
    double up, down;                 /* bytes per second */
    double delay;                    /* seconds, one way */
    double up_free_at, down_free_at; /* when the line is next idle */
    int fd;
    Packet *head, *tail; /* on their way to this host, in order */
    long num_sent_bytes, num_received_bytes, num_dropped;
} Host;

static Host hosts[MAX_HOSTS];
static int num_hosts;
static double buffer_s;
static char is_cut[MAX_HOSTS][MAX_HOSTS];
static volatile sig_atomic_t is_ending;

static void on_signal(int number) {
    (void)number;
    is_ending = 1;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static Host *find_by_name(const char *name) {
    for (int i = 0; i < num_hosts; i++)
        if (!strcmp(hosts[i].name, name)) return &hosts[i];
    return NULL;
}

static Host *find_by_ip(uint32_t ip) {
    for (int i = 0; i < num_hosts; i++)
        if (hosts[i].ip == ip) return &hosts[i];
    return NULL;
}

static int add_host(const char *spec) {
    Host *host = &hosts[num_hosts];
    char ip[32];
    double up, down, delay_ms;
    if (sscanf(spec, "%15[^:]:%31[^:]:%lf:%lf:%lf", host->name, ip, &up, &down, &delay_ms) != 5) {
        fprintf(stderr, "not a host: %s\n", spec);
        return -1;
    }
    host->ip = inet_addr(ip);
    host->up = up * BYTES_PER_MBIT;
    host->down = down * BYTES_PER_MBIT;
    host->delay = delay_ms / 1000.0;
    struct ifreq request;
    memset(&request, 0, sizeof request);
    memcpy(request.ifr_name, host->name, IFNAMSIZ);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    host->fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (host->fd < 0 || ioctl(host->fd, TUNSETIFF, &request) < 0) {
        perror("/dev/net/tun");
        return -1;
    }
    num_hosts++;
    return 0;
}

/* Take a packet from a host: decide when it arrives, or drop it. */
static void forward(Host *from, const unsigned char *bytes, int length, double moment) {
    uint32_t destination;
    if (length < 20 || bytes[0] >> 4 != 4) return;
    memcpy(&destination, bytes + 16, sizeof destination);
    Host *to = find_by_ip(destination);
    if (!to || to == from || is_cut[from - hosts][to - hosts]) {
        from->num_dropped++;
        return;
    }
    double leaves_at = from->up_free_at > moment ? from->up_free_at : moment;
    if (leaves_at - moment > buffer_s) {
        from->num_dropped++;
        return;
    }
    from->up_free_at = leaves_at + length / from->up;
    double is_there_at = from->up_free_at + from->delay + to->delay;
    double enters_at = to->down_free_at > is_there_at ? to->down_free_at : is_there_at;
    if (enters_at - is_there_at > buffer_s) {
        to->num_dropped++;
        return;
    }
    Packet *packet = malloc(sizeof *packet + length);
    if (!packet) {
        to->num_dropped++;
        return;
    }
    to->down_free_at = enters_at + length / to->down;
    from->num_sent_bytes += length;
    packet->next = NULL;
    packet->due_at = to->down_free_at;
    packet->length = length;
    memcpy(packet->bytes, bytes, length);
    if (to->tail)
        to->tail->next = packet;
    else
        to->head = packet;
    to->tail = packet;
}

/* Hand over what is due by now; return when the next packet is. */
static double deliver(double moment) {
    double next_at = moment + LONGEST_WAIT_S;
    for (int i = 0; i < num_hosts; i++) {
        Host *host = &hosts[i];
        while (host->head && host->head->due_at <= moment) {
            Packet *packet = host->head;
            if (write(host->fd, packet->bytes, packet->length) >= 0)
                host->num_received_bytes += packet->length;
            host->head = packet->next;
            if (!host->head) host->tail = NULL;
            free(packet);
        }
        if (host->head && host->head->due_at < next_at) next_at = host->head->due_at;
    }
    return next_at;
}

static int carry_out(const char *order) {
    char verb[16], name[IFNAMSIZ], other_name[IFNAMSIZ];
    double x, y;
    Host *host, *other;
    if (!strncmp(order, "stats", 5)) {
        for (int i = 0; i < num_hosts; i++)
            printf("%s sent %ld received %ld dropped %ld\n", hosts[i].name,
                   hosts[i].num_sent_bytes, hosts[i].num_received_bytes, hosts[i].num_dropped);
        return 1;
    }
    if (sscanf(order, "%15s %15s", verb, name) != 2 || !(host = find_by_name(name))) return 0;
    if (!strcmp(verb, "rate")) {
        if (sscanf(order, "%*s %*s %lf %lf", &x, &y) != 2 || x <= 0 || y <= 0) return 0;
        host->up = x * BYTES_PER_MBIT;
        host->down = y * BYTES_PER_MBIT;
        return 1;
    }
    if (!strcmp(verb, "delay")) {
        if (sscanf(order, "%*s %*s %lf", &x) != 1 || x < 0) return 0;
        host->delay = x / 1000.0;
        return 1;
    }
    if (strcmp(verb, "cut") && strcmp(verb, "heal")) return 0;
    if (sscanf(order, "%*s %*s %15s", other_name) != 1) return 0;
    if (!(other = find_by_name(other_name))) return 0;
    is_cut[host - hosts][other - hosts] = is_cut[other - hosts][host - hosts] = *verb == 'c';
    return 1;
}

static void answer(char *order) {
    order[strcspn(order, "\n")] = 0;
    if (carry_out(order))
        printf("ok\n");
    else
        printf("error: cannot do: %s\n", order);
    fflush(stdout);
}

static void run(void) {
    static unsigned char bytes[MAX_PACKET_BYTES];
    char order[256];
    struct pollfd polled[MAX_HOSTS + 1];
    while (!is_ending) {
        double wait = deliver(now()) - now();
        for (int i = 0; i < num_hosts; i++)
            polled[i] = (struct pollfd){.fd = hosts[i].fd, .events = POLLIN};
        polled[num_hosts] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
        struct timespec timeout = {0, wait > 0 ? (long)(wait * 1e9) : 0};
        if (ppoll(polled, num_hosts + 1, &timeout, NULL) <= 0) continue;
        double moment = now();
        for (int i = 0; i < num_hosts; i++)
            for (int taken = 0; polled[i].revents & POLLIN && taken < MAX_BURST; taken++) {
                int length = read(hosts[i].fd, bytes, sizeof bytes);
                if (length <= 0) break;
                forward(&hosts[i], bytes, length, moment);
            }
        if (polled[num_hosts].revents & (POLLIN | POLLHUP)) {
            if (!fgets(order, sizeof order, stdin)) return;
            answer(order);
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 3 || argc - 2 > MAX_HOSTS) {
        fprintf(stderr, "usage: delaynet BUFFER_MS NAME:IP:UP_MBIT:DOWN_MBIT:DELAY_MS ...\n");
        return 2;
    }
    buffer_s = atof(argv[1]) / 1000.0;
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    for (int i = 2; i < argc; i++)
        if (add_host(argv[i]) < 0) return 1;
    setvbuf(stdin, NULL, _IONBF, 0); /* an order must not hide in a buffer that poll cannot see */
    printf("ready\n");
    fflush(stdout);
    run();
    return 0;
}
