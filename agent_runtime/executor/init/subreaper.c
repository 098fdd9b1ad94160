/* A subreaper as in commands.py, for commands that need nothing special. It costs a fifth of the processor time: hardly a page
 * of the interpreter from which it is forked is copied.
 *
 * commands.py says what a subreaper is, and has its words for what goes wrong. This one looks at each request before it takes
 * it, and leaves what it is not made for, or could not do, to the interpreter: `fork_subreaper` then returns in the child. Each
 * function that has a twin in Python names it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* channel.py: the header of a packet, and the largest packet. */
#define HEADER_BYTES 5
#define PACKET_BYTES (30000 + HEADER_BYTES)
/* commands.py: _SOON_SECONDS, DEFAULT_PATH. */
#define SOON_NANOSECONDS 5000000
#define DEFAULT_PATH "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
/* identity.py: _MAX_DATABASE_BYTES, _MAX_ID, _MAX_GROUPS. */
#define MAX_DATABASE_BYTES (1024 * 1024)
#define MAX_ID (UINT32_MAX - 1)
#define MAX_GROUPS 256
/* Of a user list; a longer one is unusual. */
#define LINE_BYTES 8192
/* Arguments, and variables, of one command; more is unusual. */
#define MAX_STRINGS 4096
#define MAX_LIMITS 8
#define STREAMS 3

/* What `fork_subreaper` is told of the workspace. */
static struct {
    int channel, starts, notes, turn;
    uint32_t *pid_table;
    /* Whether an absolute folder of a request is the same one for this process. */
    int own_root;
    /* Of each command; this process stays as it is. */
    int nice;
    const char *user, *folder;
    uid_t uid; /* this process, when it was started */
    gid_t gid;
    int limit_count, variable_count, shell_count;
    struct {
        int which;
        rlim_t value;
    } limits[MAX_LIMITS];
    char *variables[MAX_STRINGS], *shells[8];
} here;

/* A user list as it was when it was read. */
struct database {
    const char *path;
    struct stat info;
    size_t bytes;
    char content[MAX_DATABASE_BYTES + 1];
};
static struct database passwd = {.path = "/etc/passwd"}, group = {.path = "/etc/group"};

/* identity.Identity, of the user who is named so; and the variables that it brings. */
static struct {
    char user[256];
    int is_ours; /* this process has become it */
    uid_t uid;
    gid_t groups[MAX_GROUPS];
    int group_count;
    char home[PATH_MAX], name[256 + 5], logname[256 + 8];
} identity;

/* The request that was looked at last. */
static struct {
    uint32_t number;
    const char *user, *folder;
    char *arguments[MAX_STRINGS + 3], *variables[MAX_STRINGS], *environment[MAX_STRINGS + 1];
    int variable_count;
} request;

/* What is to be told of that request: the inside of a JSON object. */
static char news[128];

/* For Python: why it is asked, and about what. */
enum result { GONE = 1, UNUSUAL = 2, NOT_STARTED = 3 };
int32_t result, failed_number, failed_errno, packet_bytes;
char packet[PACKET_BYTES];

/* The next string of a packed list that ends at `end`, as start_request.py packs them; NULL when there is none. */
static char *next_string(char **at, char *end) {
    char *start = *at, *stop = start < end ? memchr(start, 0, end - start) : NULL;
    if (stop)
        *at = stop + 1;
    return stop ? start : NULL;
}

static long next_number(char **at, char *end) {
    char *text = next_string(at, end);
    return text ? strtol(text, NULL, 10) : -1;
}

/* So many strings into `found`; 0 where there are fewer, or no room. */
static int next_strings(char **at, char *end, char **found, long count, long room) {
    if (count < 0 || count > room)
        return 0;
    for (long i = 0; i < count; i++)
        if (!(found[i] = next_string(at, end)))
            return 0;
    return 1;
}

/* identity._number: -1 for what is no id. */
static int64_t id_number(const char *text) {
    if (!*text || text[strspn(text, "0123456789")])
        return -1;
    text += strspn(text, "0");
    if (strlen(text) > 15)
        return -1;
    int64_t number = strtoll(text, NULL, 10);
    return number <= MAX_ID ? number : -1;
}

/* identity._database, when the file has changed. Whether it had. */
static int read_again(struct database *list) {
    struct stat now = {0}, *before = &list->info;
    if (stat(list->path, &now) < 0)
        now = (struct stat){0};
    if (now.st_dev == before->st_dev && now.st_ino == before->st_ino && now.st_size == before->st_size &&
        now.st_mtim.tv_sec == before->st_mtim.tv_sec && now.st_mtim.tv_nsec == before->st_mtim.tv_nsec)
        return 0;
    list->info = now;
    size_t held = 0;
    int file = open(list->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    struct stat opened;
    if (file >= 0 && fstat(file, &opened) == 0 && S_ISREG(opened.st_mode)) {
        ssize_t got;
        while (held < MAX_DATABASE_BYTES && (got = read(file, list->content + held, MAX_DATABASE_BYTES - held)) > 0)
            held += got;
    }
    if (file >= 0)
        close(file);
    list->bytes = held;
    list->content[held] = 0;
    return 1;
}

/* Whether a list has nothing in it that `next_row` cannot read. */
static int is_readable(const struct database *list) {
    for (const char *at = list->content; *at; at += strspn(at, "\n")) {
        size_t bytes = strcspn(at, "\n");
        if (bytes >= LINE_BYTES)
            return 0;
        at += bytes;
    }
    return strlen(list->content) == list->bytes;
}

/* The next line that has so many columns, copied out, each of them ended; NULL when there is none. */
static char **next_row(const char **at, int columns) {
    static char line[LINE_BYTES];
    static char *cells[8];
    while (**at) {
        size_t bytes = strcspn(*at, "\n");
        memcpy(line, *at, bytes);
        line[bytes] = 0;
        *at += bytes + ((*at)[bytes] == '\n');
        int count = 0;
        for (char *cell = line; cell && count < columns; count++) {
            cells[count] = cell;
            if ((cell = strchr(cell, ':')))
                *cell++ = 0;
        }
        if (count == columns && *cells[0])
            return cells;
    }
    return NULL;
}

static int compare_ids(const void *one, const void *other) {
    gid_t a = *(const gid_t *)one, b = *(const gid_t *)other;
    return a < b ? -1 : a > b;
}

static int is_member(const char *name, char *members) {
    for (char *member = strtok(members, ","); member; member = strtok(NULL, ","))
        if (!strcmp(member, name))
            return 1;
    return 0;
}

/* identity.resolve, into `identity`; 0 for what Python has to say something about. */
static int resolve(const char *user) {
    char wanted[sizeof identity.user], name[256];
    const char *at = passwd.content, *home = "/", *wanted_group = strchr(user, ':');
    if (strlen(user) >= sizeof wanted || !is_readable(&passwd) || !is_readable(&group))
        return 0;
    snprintf(wanted, sizeof wanted, "%.*s", (int)strcspn(user, ":"), user);
    int64_t uid = id_number(wanted);
    char **row;
    while ((row = next_row(&at, 6)) && (uid < 0 ? strcmp(row[0], wanted) != 0 : id_number(row[2]) != uid))
        ;
    if (uid < 0)
        uid = row ? id_number(row[2]) : -1;
    if (uid < 0)
        return 0;
    if (row && *row[5])
        home = row[5];
    if ((size_t)snprintf(identity.home, sizeof identity.home, "HOME=%s", home) >= sizeof identity.home)
        return 0;
    snprintf(name, sizeof name, "%lld", (long long)uid);
    if (row && (size_t)snprintf(name, sizeof name, "%s", row[0]) >= sizeof name)
        return 0;
    int64_t gid = row ? id_number(row[3]) : uid && uid == here.uid ? here.gid : uid;

    int count = 1;
    int64_t named = wanted_group && wanted_group[1] ? id_number(wanted_group + 1) : gid;
    int is_named = 0;
    for (at = group.content; (row = next_row(&at, 4));) {
        int64_t id = id_number(row[2]);
        if (wanted_group && !is_named && !strcmp(row[0], wanted_group + 1))
            named = id, is_named = 1;
        if (id >= 0 && count < MAX_GROUPS && is_member(name, row[3]))
            identity.groups[count++] = id;
    }
    if (named < 0 || count == MAX_GROUPS)
        return 0;
    identity.groups[0] = named;
    qsort(identity.groups + 1, count - 1, sizeof *identity.groups, compare_ids);
    identity.group_count = 1;
    for (int i = 1; i < count; i++)
        if (identity.groups[i] != identity.groups[0] && identity.groups[i] != identity.groups[identity.group_count - 1])
            identity.groups[identity.group_count++] = identity.groups[i];
    identity.uid = uid;
    strcpy(identity.user, user);
    snprintf(identity.name, sizeof identity.name, "USER=%s", name);
    snprintf(identity.logname, sizeof identity.logname, "LOGNAME=%s", name);
    return 1;
}

/* identity.Accounts.look_up */
static int look_up(const char *user) {
    if (read_again(&passwd) + read_again(&group) == 0 && !strcmp(identity.user, user))
        return 1;
    identity.user[0] = identity.is_ours = 0;
    return resolve(user);
}

/* commands._is_itself */
static int is_itself(void) {
    gid_t held[MAX_GROUPS], others[MAX_GROUPS];
    int count = getgroups(MAX_GROUPS, held), kept = 0;
    if (count < 0 || geteuid() != identity.uid || getegid() != identity.groups[0])
        return 0;
    qsort(held, count, sizeof *held, compare_ids);
    for (int i = 0; i < count; i++)
        if (held[i] != identity.groups[0] && (!kept || held[i] != others[kept - 1]))
            others[kept++] = held[i];
    return kept == identity.group_count - 1 && !memcmp(others, identity.groups + 1, kept * sizeof *others);
}

/* identity.become */
static int become(void) {
    gid_t gid = identity.groups[0];
    if (identity.is_ours)
        return 1;
    if (geteuid() != identity.uid || getegid() != gid || geteuid() == 0) {
        if (setgroups(identity.group_count, identity.groups) < 0 && errno != EPERM)
            return 0;
        if (setresgid(gid, gid, gid) < 0 || setresuid(identity.uid, identity.uid, identity.uid) < 0)
            return 0;
    }
    identity.is_ours = prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0;
    return identity.is_ours;
}

/* Whether the packet of so many bytes is a whole request that is nothing special; `request` is it then. */
static int understand(ssize_t bytes) {
    if (bytes < HEADER_BYTES || !packet[0])
        return 0;
    memcpy(&request.number, packet + 1, sizeof request.number);
    char *at = packet + HEADER_BYTES, *end = packet + bytes;
    char *user = next_string(&at, end), *folder = next_string(&at, end), *how = next_string(&at, end);
    long count = next_number(&at, end);
    if (count < 1 || (*folder && (*folder != '/' || !here.own_root)))
        return 0;
    request.user = *user ? user : here.user;
    request.folder = *folder ? folder : here.folder;
    char **arguments = request.arguments;
    if (!strcmp(how, "shell")) {
        int shell = 0;
        while (shell < here.shell_count - 1 && access(here.shells[shell], X_OK) < 0)
            shell++;
        *arguments++ = here.shells[shell];
        *arguments++ = "-c";
    } else if (strcmp(how, "program"))
        return 0;
    if (!next_strings(&at, end, arguments, count, MAX_STRINGS))
        return 0;
    arguments[count] = NULL;
    for (request.variable_count = 0; at < end; request.variable_count++)
        if (!next_strings(&at, end, request.variables + request.variable_count, 1, MAX_STRINGS - request.variable_count))
            return 0;
    return 1;
}

/* Add NAME=VALUE to the environment of so many, in place of another of that name. The new count; -1: no room. */
static int set_variable(int count, char *variable) {
    size_t bytes = strcspn(variable, "=") + 1;
    for (int i = 0; i < count; i++)
        if (!strncmp(request.environment[i], variable, bytes)) {
            request.environment[i] = variable;
            return count;
        }
    if (count < 0 || count == MAX_STRINGS)
        return -1;
    request.environment[count] = variable;
    return count + 1;
}

/* commands._environment */
static int make_environment(void) {
    int count = set_variable(0, DEFAULT_PATH);
    for (int i = 0; i < here.variable_count; i++)
        count = set_variable(count, here.variables[i]);
    count = set_variable(count, identity.home);
    count = set_variable(count, identity.name);
    count = set_variable(count, identity.logname);
    for (int i = 0; i < request.variable_count; i++)
        count = set_variable(count, request.variables[i]);
    if (count >= 0)
        request.environment[count] = NULL;
    return count >= 0;
}

static int is_program(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) && access(path, X_OK) == 0;
}

/* commands._find: the path of the program; NULL for what Python has to say something about. */
static const char *find_program(void) {
    static char found[PATH_MAX];
    const char *name = request.arguments[0], *path = "";
    if (strchr(name, '/'))
        return is_program(name) ? name : NULL;
    for (char **variable = request.environment; *variable; variable++)
        if (!strncmp(*variable, "PATH=", 5))
            path = *variable + 5;
    while (*path) {
        int bytes = strcspn(path, ":");
        if (bytes && snprintf(found, sizeof found, "%.*s/%s", bytes, path, name) < (int)sizeof found && is_program(found))
            return found;
        path += bytes + (path[bytes] == ':');
    }
    return NULL;
}

/* Take the request that was looked at, with its streams. */
static int take(int streams[STREAMS]) {
    union {
        char space[CMSG_SPACE(STREAMS * sizeof(int))];
        struct cmsghdr aligned;
    } control;
    struct iovec content = {packet, sizeof packet};
    struct msghdr message = {.msg_iov = &content, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t bytes = recvmsg(here.starts, &message, MSG_CMSG_CLOEXEC);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (bytes < 0 || !header || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(STREAMS * sizeof(int)))
        return 0;
    memcpy(streams, CMSG_DATA(header), STREAMS * sizeof(int));
    return 1;
}

/* commands.SubreaperState.tell */
static void tell(uint32_t is_busy) {
    uint32_t note[] = {getpid(), is_busy};
    (void)!write(here.notes, note, sizeof note);
}

static int lock_turn(int command, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET};
    int locked;
    do
        locked = fcntl(here.turn, command, &lock);
    while (locked < 0 && errno == EINTR);
    return locked == 0;
}

static void send_news(void) {
    char sent[HEADER_BYTES + sizeof news + 2] = {1};
    memcpy(sent + 1, &request.number, sizeof request.number);
    int bytes = HEADER_BYTES + sprintf(sent + HEADER_BYTES, "{%s}", news);
    (void)!send(here.channel, sent, bytes, MSG_NOSIGNAL);
    news[0] = 0;
}

static void add_news(const char *key, int value, const char *more) {
    size_t held = strlen(news);
    snprintf(news + held, sizeof news - held, "%s\"%s\": %d%s", held ? ", " : "", key, value, more);
}

/* Start the program: its process, or 0 with errno. */
static pid_t start(const char *program, const int streams[STREAMS]) {
    volatile int failure = 0;
    pid_t pid = vfork();
    if (pid == 0) {
        struct sigaction standard = {.sa_handler = SIG_DFL};
        sigset_t none;
        for (int target = 0; target < STREAMS; target++)
            dup2(streams[target], target);
        setsid();
        setpriority(PRIO_PROCESS, 0, here.nice);
        /* commands.py: _RESTORED_SIGNALS. */
        sigaction(SIGPIPE, &standard, NULL);
        sigaction(SIGXFSZ, &standard, NULL);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        execve(program, request.arguments, request.environment);
        failure = errno;
        _exit(127);
    }
    if (pid < 0)
        failure = errno;
    else if (failure)
        waitpid(pid, NULL, 0);
    errno = failure;
    return failure ? 0 : pid;
}

/* commands._follow: whether it is this process that waits for the next request. */
static int follow(pid_t command) {
    const struct timespec soon = {0, SOON_NANOSECONDS};
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    int is_busy = 0;
    add_news("pid", command, "");
    while (sigtimedwait(&child, NULL, &soon) < 0 && errno == EINTR)
        ;
    for (;;) {
        int status;
        pid_t ended = waitpid(-1, &status, news[0] ? WNOHANG : 0);
        if (ended < 0 && errno == EINTR)
            continue;
        if (ended < 0) {
            int is_next = lock_turn(F_SETLK, F_WRLCK);
            here.pid_table[getpid()] = 0;
            if (is_next && is_busy)
                tell(0);
            if (news[0])
                send_news();
            return is_next;
        }
        if (!ended && !is_busy)
            tell(is_busy = 1);
        if (ended == command && WIFEXITED(status))
            add_news("code", WEXITSTATUS(status), ", \"signal\": null");
        else if (ended == command)
            add_news("signal", WTERMSIG(status), ", \"code\": null");
        else if (!ended)
            send_news();
    }
}

static enum result work(void) {
    for (;;) {
        ssize_t bytes = recv(here.starts, packet, sizeof packet, MSG_PEEK);
        if (bytes < 0 && errno == EINTR)
            continue;
        if (bytes <= 0)
            return GONE;
        if (!understand(bytes) || !look_up(request.user) || (!identity.is_ours && geteuid() && !is_itself()) || !become())
            return UNUSUAL;
        const char *program = chdir(request.folder) == 0 && make_environment() ? find_program() : NULL;
        if (!program)
            return UNUSUAL;
        int streams[STREAMS];
        if (!take(streams))
            return GONE;
        here.pid_table[getpid()] = request.number;
        lock_turn(F_SETLK, F_UNLCK);
        pid_t command = start(program, streams);
        failed_number = request.number, failed_errno = errno, packet_bytes = bytes;
        for (int i = 0; i < STREAMS; i++)
            close(streams[i]);
        if (!command)
            return NOT_STARTED;
        if (!follow(command))
            return GONE;
    }
}

/* Begins with the turn, and ends with it when it leaves a request in the queue: UNUSUAL. */
int32_t serve(void) {
    /* Python may have become somebody else meanwhile. */
    identity.is_ours = 0;
    return result = work();
}

static void settle(void) {
    struct sigaction standard = {.sa_handler = SIG_DFL};
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    sigaction(SIGCHLD, &standard, NULL);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    for (int i = 0; i < here.limit_count; i++) {
        struct rlimit limit;
        getrlimit(here.limits[i].which, &limit);
        if (here.limits[i].value < limit.rlim_max)
            limit.rlim_max = here.limits[i].value;
        limit.rlim_cur = limit.rlim_max;
        setrlimit(here.limits[i].which, &limit);
    }
}

/* What Python tells of the workspace, in the order of fork_native in commands.py. */
static int listen_to(char *told, char *end) {
    here.uid = geteuid(), here.gid = getegid();
    here.channel = next_number(&told, end), here.starts = next_number(&told, end);
    here.notes = next_number(&told, end), here.turn = next_number(&told, end);
    here.pid_table = (uint32_t *)next_number(&told, end);
    here.own_root = next_number(&told, end), here.nice = next_number(&told, end);
    here.user = next_string(&told, end), here.folder = next_string(&told, end);
    here.limit_count = next_number(&told, end);
    for (int i = 0; i < here.limit_count && i < MAX_LIMITS; i++) {
        here.limits[i].which = next_number(&told, end);
        here.limits[i].value = strtoull(next_string(&told, end), NULL, 10);
    }
    here.shell_count = next_number(&told, end);
    if (!next_strings(&told, end, here.shells, here.shell_count, sizeof here.shells / sizeof *here.shells))
        return 0;
    here.variable_count = next_number(&told, end);
    return here.limit_count <= MAX_LIMITS && next_strings(&told, end, here.variables, here.variable_count, MAX_STRINGS);
}

/* As fork(2). The child comes back only when there is something that Python has to do; `result` says what. */
int32_t fork_subreaper(char *told, int32_t bytes) {
    pid_t pid = fork();
    if (pid)
        return pid;
    if (!listen_to(told, told + bytes))
        _exit(1);
    settle();
    lock_turn(F_SETLKW, F_WRLCK);
    if (serve() == GONE)
        _exit(0);
    return 0;
}
