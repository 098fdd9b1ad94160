/* The subreaper of commands.py in C, for ordinary commands. It needs a fifth of the processor time of the Python version,
 * because it copies hardly any memory page of the interpreter from which it is forked.
 *
 * commands.py explains subreapers and has all error messages. This code inspects each request before it removes it from the
 * queue. It leaves requests that it does not support, or that fail, to Python: `fork_subreaper` then returns in the child.
 * A comment names the Python counterpart of a function, where there is one.
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

/* channel.py: bytes of a packet's header, and of the largest packet. */
#define HEADER_BYTES 5
#define PACKET_BYTES (30000 + HEADER_BYTES)
/* commands.py: _SOON_SECONDS, DEFAULT_PATH. */
#define SOON_NANOSECONDS 5000000
#define DEFAULT_PATH "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
/* identity.py: _MAX_DATABASE_BYTES, _MAX_ID, _MAX_GROUPS. */
#define MAX_DATABASE_BYTES (1024 * 1024)
#define MAX_ID (UINT32_MAX - 1)
#define MAX_GROUPS 256
/* Longest supported line of /etc/passwd and /etc/group. */
#define LINE_BYTES 8192
/* Most arguments of one command, and most environment variables. */
#define MAX_STRINGS 4096
#define MAX_LIMITS 8
#define STREAMS 3

/* The arguments of `fork_subreaper`. */
static struct {
    int channel, starts, note_writer, turn;
    uint32_t *pid_table;
    /* Whether absolute paths of the workspace are valid in this process. */
    int has_same_paths;
    /* The priority of commands. This process keeps its own. */
    int nice;
    const char *user, *folder;
    uid_t uid; /* of this process when it was forked */
    gid_t gid;
    int limit_count, variable_count, shell_count;
    struct {
        int which;
        rlim_t value;
    } limits[MAX_LIMITS];
    char *variables[MAX_STRINGS], *shells[8];
} workspace;

/* The cached content of a user list. */
struct database {
    const char *path;
    struct stat info;
    size_t bytes;
    char content[MAX_DATABASE_BYTES + 1];
};
static struct database passwd = {.path = "/etc/passwd"}, group = {.path = "/etc/group"};

/* identity.Identity of `user`, with the environment variables that depend on it. */
static struct {
    char user[256];
    int is_current; /* this process runs as this user */
    uid_t uid;
    gid_t groups[MAX_GROUPS];
    int group_count;
    char home[PATH_MAX], name[256 + 5], logname[256 + 8];
} identity;

/* The last parsed request. */
static struct {
    uint32_t number;
    const char *user, *folder;
    char *arguments[MAX_STRINGS + 3], *variables[MAX_STRINGS], *environment[MAX_STRINGS + 1];
    int variable_count;
} request;

/* The next report on that request: the members of a JSON object, without braces. */
static char report[128];

/* Read by native.py: why `serve` returned, and the request that failed. */
enum result { DISCONNECTED = 1, LEFT_TO_PYTHON = 2, NOT_STARTED = 3 };
int32_t result, failed_number, failed_errno, packet_bytes;
char packet[PACKET_BYTES];

/* Return the next string of a list packed as in channel.py, which ends at `end`; NULL at the end. */
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

/* Store the next `count` strings in `found`, which has space for `room`. Return 0 if that is impossible. */
static int next_strings(char **at, char *end, char **found, long count, long room) {
    if (count < 0 || count > room)
        return 0;
    for (long i = 0; i < count; i++)
        if (!(found[i] = next_string(at, end)))
            return 0;
    return 1;
}

/* identity._number; -1 if `text` is not an id. */
static int64_t id_number(const char *text) {
    if (!*text || text[strspn(text, "0123456789")])
        return -1;
    text += strspn(text, "0");
    if (strlen(text) > 15)
        return -1;
    int64_t number = strtoll(text, NULL, 10);
    return number <= MAX_ID ? number : -1;
}

/* identity._database, only if the file has changed. Return whether it has. */
static int reload_if_changed(struct database *list) {
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

/* Return whether `next_row` supports every line of the list. */
static int is_readable(const struct database *list) {
    for (const char *at = list->content; *at; at += strspn(at, "\n")) {
        size_t bytes = strcspn(at, "\n");
        if (bytes >= LINE_BYTES)
            return 0;
        at += bytes;
    }
    return strlen(list->content) == list->bytes;
}

/* Return the cells of the next line with at least `columns` columns, or NULL. The next call overwrites them. */
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

/* identity.resolve, into `identity`. Return 0 if Python must handle the user, for instance to report an error. */
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
    int64_t gid = row ? id_number(row[3]) : uid && uid == workspace.uid ? workspace.gid : uid;

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
    if (reload_if_changed(&passwd) + reload_if_changed(&group) == 0 && !strcmp(identity.user, user))
        return 1;
    identity.user[0] = identity.is_current = 0;
    return resolve(user);
}

/* commands._runs_as */
static int runs_as_identity(void) {
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
    if (identity.is_current)
        return 1;
    if (geteuid() != identity.uid || getegid() != gid || geteuid() == 0) {
        if (setgroups(identity.group_count, identity.groups) < 0 && errno != EPERM)
            return 0;
        if (setresgid(gid, gid, gid) < 0 || setresuid(identity.uid, identity.uid, identity.uid) < 0)
            return 0;
    }
    identity.is_current = prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0;
    return identity.is_current;
}

/* Parse `packet` into `request`. Return 0 if the request is incomplete or Python must handle it. */
static int parse_request(ssize_t bytes) {
    if (bytes < HEADER_BYTES || !packet[0])
        return 0;
    memcpy(&request.number, packet + 1, sizeof request.number);
    char *at = packet + HEADER_BYTES, *end = packet + bytes;
    char *user = next_string(&at, end), *folder = next_string(&at, end), *kind = next_string(&at, end);
    long count = next_number(&at, end);
    if (count < 1 || (*folder && (*folder != '/' || !workspace.has_same_paths)))
        return 0;
    request.user = *user ? user : workspace.user;
    request.folder = *folder ? folder : workspace.folder;
    char **arguments = request.arguments;
    if (!strcmp(kind, "shell")) {
        int shell = 0;
        while (shell < workspace.shell_count - 1 && access(workspace.shells[shell], X_OK) < 0)
            shell++;
        *arguments++ = workspace.shells[shell];
        *arguments++ = "-c";
    } else if (strcmp(kind, "program"))
        return 0;
    if (!next_strings(&at, end, arguments, count, MAX_STRINGS))
        return 0;
    arguments[count] = NULL;
    for (request.variable_count = 0; at < end; request.variable_count++)
        if (!next_strings(&at, end, request.variables + request.variable_count, 1, MAX_STRINGS - request.variable_count))
            return 0;
    return 1;
}

/* Set NAME=VALUE in the environment, which has `count` variables. Return the new count, or -1 if it is full. */
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
    for (int i = 0; i < workspace.variable_count; i++)
        count = set_variable(count, workspace.variables[i]);
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

/* commands._find: return the program's path, or NULL if Python must report an error. */
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

/* Remove the parsed request from the queue and receive its streams. */
static int receive_streams(int streams[STREAMS]) {
    union {
        char space[CMSG_SPACE(STREAMS * sizeof(int))];
        struct cmsghdr aligned;
    } control;
    struct iovec content = {packet, sizeof packet};
    struct msghdr message = {.msg_iov = &content, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t bytes = recvmsg(workspace.starts, &message, MSG_CMSG_CLOEXEC);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (bytes < 0 || !header || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(STREAMS * sizeof(int)))
        return 0;
    memcpy(streams, CMSG_DATA(header), STREAMS * sizeof(int));
    return 1;
}

/* commands.SubreaperState.notify */
static void notify_init(uint32_t is_busy) {
    uint32_t note[] = {getpid(), is_busy};
    (void)!write(workspace.note_writer, note, sizeof note);
}

static int lock_turn(int command, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET};
    int locked;
    do
        locked = fcntl(workspace.turn, command, &lock);
    while (locked < 0 && errno == EINTR);
    return locked == 0;
}

static void send_report(void) {
    char sent[HEADER_BYTES + sizeof report + 2] = {1};
    memcpy(sent + 1, &request.number, sizeof request.number);
    int bytes = HEADER_BYTES + sprintf(sent + HEADER_BYTES, "{%s}", report);
    (void)!send(workspace.channel, sent, bytes, MSG_NOSIGNAL);
    report[0] = 0;
}

static void add_to_report(const char *key, int value, const char *more) {
    size_t held = strlen(report);
    snprintf(report + held, sizeof report - held, "%s\"%s\": %d%s", held ? ", " : "", key, value, more);
}

/* Start the program. Return its process id, or 0 and set errno. */
static pid_t start_program(const char *program, const int streams[STREAMS]) {
    volatile int failure = 0;
    pid_t pid = vfork();
    if (pid == 0) {
        struct sigaction standard = {.sa_handler = SIG_DFL};
        sigset_t none;
        for (int target = 0; target < STREAMS; target++)
            dup2(streams[target], target);
        setsid();
        setpriority(PRIO_PROCESS, 0, workspace.nice);
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

/* commands._report_and_reap: return whether this process waits for the next request. */
static int report_and_reap(pid_t command) {
    const struct timespec soon = {0, SOON_NANOSECONDS};
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    int is_busy = 0;
    add_to_report("pid", command, "");
    while (sigtimedwait(&child, NULL, &soon) < 0 && errno == EINTR)
        ;
    for (;;) {
        int status;
        pid_t ended = waitpid(-1, &status, report[0] ? WNOHANG : 0);
        if (ended < 0 && errno == EINTR)
            continue;
        if (ended < 0) {
            int is_next = lock_turn(F_SETLK, F_WRLCK);
            workspace.pid_table[getpid()] = 0;
            if (is_next && is_busy)
                notify_init(0);
            if (report[0])
                send_report();
            return is_next;
        }
        if (!ended && !is_busy)
            notify_init(is_busy = 1);
        if (ended == command && WIFEXITED(status))
            add_to_report("code", WEXITSTATUS(status), ", \"signal\": null");
        else if (ended == command)
            add_to_report("signal", WTERMSIG(status), ", \"code\": null");
        else if (!ended)
            send_report();
    }
}

static enum result serve_requests(void) {
    for (;;) {
        ssize_t bytes = recv(workspace.starts, packet, sizeof packet, MSG_PEEK);
        if (bytes < 0 && errno == EINTR)
            continue;
        if (bytes <= 0)
            return DISCONNECTED;
        if (!parse_request(bytes) || !look_up(request.user) ||
            (!identity.is_current && geteuid() && !runs_as_identity()) || !become())
            return LEFT_TO_PYTHON;
        const char *program = chdir(request.folder) == 0 && make_environment() ? find_program() : NULL;
        if (!program)
            return LEFT_TO_PYTHON;
        int streams[STREAMS];
        if (!receive_streams(streams))
            return DISCONNECTED;
        workspace.pid_table[getpid()] = request.number;
        lock_turn(F_SETLK, F_UNLCK);
        pid_t command = start_program(program, streams);
        failed_number = request.number, failed_errno = errno, packet_bytes = bytes;
        for (int i = 0; i < STREAMS; i++)
            close(streams[i]);
        if (!command)
            return NOT_STARTED;
        if (!report_and_reap(command))
            return DISCONNECTED;
    }
}

/* Handle requests. The caller holds the lock `turn`, and still holds it after the result LEFT_TO_PYTHON. */
int32_t serve(void) {
    /* Python may have changed this process's user meanwhile. */
    identity.is_current = 0;
    return result = serve_requests();
}

static void prepare_process(void) {
    struct sigaction standard = {.sa_handler = SIG_DFL};
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    sigaction(SIGCHLD, &standard, NULL);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    for (int i = 0; i < workspace.limit_count; i++) {
        struct rlimit limit;
        getrlimit(workspace.limits[i].which, &limit);
        if (workspace.limits[i].value < limit.rlim_max)
            limit.rlim_max = workspace.limits[i].value;
        limit.rlim_cur = limit.rlim_max;
        setrlimit(workspace.limits[i].which, &limit);
    }
}

/* Read the arguments in the order of fork_native in commands.py. Return 0 if they exceed a limit. */
static int parse_settings(char *packed, char *end) {
    workspace.uid = geteuid(), workspace.gid = getegid();
    workspace.channel = next_number(&packed, end), workspace.starts = next_number(&packed, end);
    workspace.note_writer = next_number(&packed, end), workspace.turn = next_number(&packed, end);
    workspace.pid_table = (uint32_t *)next_number(&packed, end);
    workspace.has_same_paths = next_number(&packed, end), workspace.nice = next_number(&packed, end);
    workspace.user = next_string(&packed, end), workspace.folder = next_string(&packed, end);
    workspace.limit_count = next_number(&packed, end);
    for (int i = 0; i < workspace.limit_count && i < MAX_LIMITS; i++) {
        workspace.limits[i].which = next_number(&packed, end);
        workspace.limits[i].value = strtoull(next_string(&packed, end), NULL, 10);
    }
    workspace.shell_count = next_number(&packed, end);
    if (!next_strings(&packed, end, workspace.shells, workspace.shell_count,
                      sizeof workspace.shells / sizeof *workspace.shells))
        return 0;
    workspace.variable_count = next_number(&packed, end);
    return workspace.limit_count <= MAX_LIMITS &&
           next_strings(&packed, end, workspace.variables, workspace.variable_count, MAX_STRINGS);
}

/* Fork, with the results of fork(2). In the child, return only when Python must act; `result` says why. */
int32_t fork_subreaper(char *packed, int32_t bytes) {
    pid_t pid = fork();
    if (pid)
        return pid;
    if (!parse_settings(packed, packed + bytes))
        _exit(1);
    prepare_process();
    lock_turn(F_SETLKW, F_WRLCK);
    if (serve() == DISCONNECTED)
        _exit(0);
    return 0;
}
