/* The first program of the executor's bundle: starts the bundle's Python through the bundle's own loader.
 *
 * It is statically linked, because the sandbox image may have no libc, or another one. The image's environment variables
 * (LD_PRELOAD, PYTHONPATH and the like) do not reach loader or interpreter: they are passed as arguments after
 * --environment, and only the tools get them.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Does what python -m does, without the modules that -m imports. */
#define PROGRAM "import sys; from agent_runtime.executor.__main__ import main; sys.exit(main(sys.argv[1:]))"

static char *below(const char *folder, const char *name) {
    char *path;
    if (asprintf(&path, "%s/%s", folder, name) < 0)
        abort();
    return path;
}

int main(int argc, char **argv, char **environment) {
    static char home[PATH_MAX];
    /* argv[0] is used if /proc is not mounted. */
    if (readlink("/proc/self/exe", home, sizeof home - 1) < 0 && !realpath(argv[0], home)) {
        fprintf(stderr, "executor: cannot find the folder it is in (%s); start it by its absolute path\n", strerror(errno));
        return 2;
    }
    char *last = strrchr(home, '/');
    if (last)
        *last = '\0';

    char *loader = below(home, "python/lib/loader"), *python = below(home, "python/bin/python3");
    /* -I -S -B: ignore environment variables, do not import site, write no bytecode. UTF-8 in every locale. */
    char *start[] = {loader, "--inhibit-cache", "--library-path", below(home, "python/lib"), "--argv0", python, python, "-I", "-S",
                     "-B", "-X", "utf8", "-c", PROGRAM};
    size_t fixed = sizeof start / sizeof *start, variables = 0, n = 0;
    while (environment[variables])
        variables++;
    char **command = calloc(fixed + argc + 1 + variables + 1, sizeof *command);
    if (!command)
        abort();
    for (size_t i = 0; i < fixed; i++)
        command[n++] = start[i];
    for (int i = 1; i < argc; i++)
        command[n++] = argv[i];
    command[n++] = "--environment";
    for (size_t i = 0; i < variables; i++)
        command[n++] = environment[i];

    char *nothing[] = {NULL};
    execve(loader, command, nothing);
    fprintf(stderr, "executor: %s cannot be started: %s; is the bundle complete, and not mounted noexec?\n", loader,
            strerror(errno));
    return 2;
}
