/* Makes calls on files fail, for tests of storage faults: loaded with LD_PRELOAD.
 *
 *   FAULT_PATH    only files whose path begins so are concerned
 *   FAULT_TRACE   writes down each call on them: its name and the path
 *   FAULT_AT      the number of the one call that fails, from 1
 *   FAULT_CALL    or: the name of the call that fails each time,
 *   FAULT_WHILE   for as long as this file exists
 *   FAULT_ERRNO   how it fails
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FILES 4096
static char *paths[FILES]; /* of open files that are concerned */
static int calls;

static int concerned(const char *path) {
    const char *start = getenv("FAULT_PATH");
    return start && path && strncmp(path, start, strlen(start)) == 0;
}

/* Whether this call is to fail; errno says how. */
static int fails(const char *call, const char *path) {
    const char *trace = getenv("FAULT_TRACE"), *at = getenv("FAULT_AT");
    const char *name = getenv("FAULT_CALL"), *flag = getenv("FAULT_WHILE"), *error = getenv("FAULT_ERRNO");
    int number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (trace) {
        char line[4200];
        int length = snprintf(line, sizeof line, "%s %s\n", call, path);
        int file = syscall(SYS_openat, AT_FDCWD, trace, O_WRONLY | O_CREAT | O_APPEND, 0600);
        syscall(SYS_write, file, line, length);
        syscall(SYS_close, file);
    }
    int once = at && atoi(at) == number;
    int always = name && flag && strcmp(name, call) == 0 && access(flag, F_OK) == 0;
    if (once || always) {
        errno = error ? atoi(error) : EIO;
        return 1;
    }
    return 0;
}

static int opened(const char *path, int flags, mode_t mode) {
    if (!concerned(path)) return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    if (fails("open", path)) return -1;
    int file = syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    if (file >= 0 && file < FILES) paths[file] = strdup(path);
    return file;
}

#define OPEN(name)                                   \
    int name(const char *path, int flags, ...) {     \
        va_list rest;                                \
        va_start(rest, flags);                       \
        mode_t mode = va_arg(rest, unsigned);        \
        va_end(rest);                                \
        return opened(path, flags, mode);            \
    }
OPEN(open)
OPEN(open64)

/* A call on an open file. */
#define ON_FILE(result, name, parameters, arguments)                                      \
    result name parameters {                                                              \
        static result (*real) parameters;                                                 \
        if (!real) real = (result(*) parameters)dlsym(RTLD_NEXT, #name);                  \
        if (file >= 0 && file < FILES && paths[file] && fails(#name, paths[file])) return -1; \
        return real arguments;                                                            \
    }
ON_FILE(ssize_t, write, (int file, const void *bytes, size_t count), (file, bytes, count))
ON_FILE(int, fsync, (int file), (file))
ON_FILE(int, fdatasync, (int file), (file))
ON_FILE(int, ftruncate, (int file, off_t length), (file, length))
ON_FILE(int, ftruncate64, (int file, off64_t length), (file, length))
ON_FILE(int, flock, (int file, int how), (file, how))

int close(int file) {
    if (file >= 0 && file < FILES && paths[file]) {
        free(paths[file]);
        paths[file] = NULL;
    }
    return syscall(SYS_close, file);
}

int rename(const char *from, const char *to) {
    if (concerned(from) && fails("rename", from)) return -1;
    return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}
