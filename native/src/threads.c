/* threads.c: how many threads a pool has by default: cores that we may run on, not more than the control groups grant. */
#include "internal.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PATH_BYTES 4096

/* First line of dir/name into text; false when there is none. */
static bool read_line(const char *dir, const char *name, char *text, size_t bytes)
{
    char path[PATH_BYTES + 64];
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return false;
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    bool found = fgets(text, (int)bytes, f) != NULL;
    fclose(f);
    return found;
}

/* CPUs that one group grants; 0 when it sets no limit. */
static double quota_of(const char *dir)
{
    char line[64];
    double quota = 0, period = 0;
    if (read_line(dir, "cpu.max", line, sizeof line)) { /* version 2: "max 100000" or "150000 100000" */
        if (sscanf(line, "%lf %lf", &quota, &period) != 2)
            return 0;
    } else if (read_line(dir, "cpu.cfs_quota_us", line, sizeof line)) { /* version 1: -1 for no limit */
        if (sscanf(line, "%lf", &quota) != 1 || !read_line(dir, "cpu.cfs_period_us", line, sizeof line) ||
            sscanf(line, "%lf", &period) != 1)
            return 0;
    }
    return quota > 0 && period > 0 ? quota / period : 0;
}

/* The smallest quota from root/group up to root: each group on the way may set one. */
static double quota_upwards(const char *root, const char *group, double least)
{
    char dir[PATH_BYTES];
    if (snprintf(dir, sizeof dir, "%s%s", root, group) >= (int)sizeof dir)
        return least;
    for (size_t top = strlen(root);;) {
        double quota = quota_of(dir);
        if (quota > 0 && (least == 0 || quota < least))
            least = quota;
        char *slash = strrchr(dir, '/');
        if (strlen(dir) <= top || !slash)
            return least;
        dir[CB_MAX((size_t)(slash - dir), top)] = 0;
    }
}

int cb_quota_cpus(const char *membership, const char *root)
{
    FILE *f = fopen(membership, "re");
    if (!f)
        return 0;
    double least = 0;
    char line[PATH_BYTES + 64], mount[PATH_BYTES];
    while (fgets(line, sizeof line, f)) { /* "4:cpu,cpuacct:/group" (version 1) or "0::/group" (version 2) */
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        controllers++;
        *group++ = 0;
        if (!*controllers) {
            least = quota_upwards(root, group, least);
            continue;
        }
        bool is_cpu = false;
        char list[256];
        snprintf(list, sizeof list, ",%s,", controllers);
        is_cpu = strstr(list, ",cpu,") != NULL;
        const char *names[] = {controllers, "cpu"}; /* the mount's name is a habit, not a rule */
        for (int i = 0; is_cpu && i < 2; i++)
            if (snprintf(mount, sizeof mount, "%s/%s", root, names[i]) < (int)sizeof mount)
                least = quota_upwards(mount, group, least);
    }
    fclose(f);
    return least > 0 ? CB_MAX(1, (int)(least + 0.999)) : 0;
}

/* A core's second hyper-thread adds nothing to kernels that wait for memory: count the first of each core. */
static int usable_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set))
        return (int)CB_MAX(1, sysconf(_SC_NPROCESSORS_ONLN));
    int n = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &set))
            continue;
        char path[96];
        int first = cpu;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        FILE *f = fopen(path, "re");
        if (f) {
            if (fscanf(f, "%d", &first) != 1)
                first = cpu;
            fclose(f);
        }
        if (first == cpu || first < 0 || first >= CPU_SETSIZE || !CPU_ISSET(first, &set))
            n++;
    }
    return n < 1 ? 1 : n;
}

int cb_default_threads(void)
{
    int n = usable_cores(), quota = cb_quota_cpus("/proc/self/cgroup", "/sys/fs/cgroup");
    return quota && quota < n ? quota : n;
}
