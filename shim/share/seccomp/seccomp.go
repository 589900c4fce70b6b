// Package seccomp limits a process to the system calls that serving files takes, once it is set up: those of the Go runtime
// and those about files. It can't make processes, sockets, namespaces or executable memory. Any other call kills it.
package seccomp

import (
	"fmt"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offsets in struct seccomp_data (linux/seccomp.h).
const (
	offsetNr   = 0
	offsetArch = 4
	offsetArgs = 16 // 8 bytes each, of which the lower half comes first
)

// goRuntime is what a running Go program calls.
var goRuntime = []uint32{
	unix.SYS_CLOCK_GETTIME, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOSE, unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL,
	unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2, unix.SYS_EXIT,
	unix.SYS_EXIT_GROUP, unix.SYS_FCNTL, unix.SYS_FUTEX, unix.SYS_GETPID, unix.SYS_GETRANDOM, unix.SYS_GETTID, unix.SYS_MADVISE,
	unix.SYS_MUNMAP, unix.SYS_NANOSLEEP, unix.SYS_READ, unix.SYS_RESTART_SYSCALL, unix.SYS_RT_SIGACTION,
	unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SCHED_GETAFFINITY, unix.SYS_SCHED_YIELD, unix.SYS_SIGALTSTACK,
	unix.SYS_TGKILL, unix.SYS_WRITE,
}

// files is what package ninep calls.
var files = []uint32{
	unix.SYS_FCHMOD, unix.SYS_FCHMODAT, unix.SYS_FCHOWNAT, unix.SYS_FDATASYNC, unix.SYS_FSTAT, unix.SYS_FSTATFS, unix.SYS_FSYNC,
	unix.SYS_FTRUNCATE, unix.SYS_GETDENTS64, unix.SYS_GETXATTR, unix.SYS_LINKAT, unix.SYS_LISTXATTR, unix.SYS_LSEEK,
	unix.SYS_MKDIRAT, unix.SYS_OPENAT, unix.SYS_OPENAT2, unix.SYS_PREAD64, unix.SYS_PWRITE64, unix.SYS_READLINKAT,
	unix.SYS_REMOVEXATTR, unix.SYS_RENAMEAT2, unix.SYS_SETXATTR, unix.SYS_SYMLINKAT, unix.SYS_UNLINKAT, unix.SYS_UTIMENSAT,
}

// Install filters all threads of the process, which must have no_new_privs.
func Install() error {
	prog := program()
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(prog)
	if errno != 0 {
		return fmt.Errorf("filter system calls: %w", errno)
	}
	return nil
}

// program is the filter. Each test is followed by its verdict, and goes on after it if it fails.
func program() []unix.SockFilter {
	p := []unix.SockFilter{
		load(offsetArch),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.AUDIT_ARCH_X86_64, Jt: 1},
		verdict(unix.SECCOMP_RET_KILL_PROCESS),
		load(offsetNr),
	}
	for _, nr := range slices.Concat(goRuntime, files) {
		p = append(p, unless(unix.BPF_JEQ, nr, 1), verdict(unix.SECCOMP_RET_ALLOW))
	}
	// The runtime names its memory with prctl, and goes on without.
	p = append(p, unless(unix.BPF_JEQ, unix.SYS_PRCTL, 1), verdict(unix.SECCOMP_RET_ERRNO|uint32(unix.EINVAL)))
	// Threads, no processes; memory that isn't executable.
	p = append(p, unless(unix.BPF_JEQ, unix.SYS_CLONE, 4),
		load(offsetArgs), unless(unix.BPF_JSET, unix.CLONE_THREAD, 1), verdict(unix.SECCOMP_RET_ALLOW), verdict(unix.SECCOMP_RET_KILL_PROCESS))
	p = append(p, unless(unix.BPF_JEQ, unix.SYS_MMAP, 4),
		load(offsetArgs+2*8), unless(unix.BPF_JSET, unix.PROT_EXEC, 1), verdict(unix.SECCOMP_RET_KILL_PROCESS), verdict(unix.SECCOMP_RET_ALLOW))
	return append(p, verdict(unix.SECCOMP_RET_KILL_PROCESS))
}

func load(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

func verdict(v uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: v}
}

// unless jumps over the next n instructions when the test fails.
func unless(test uint16, k uint32, n uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | test | unix.BPF_K, K: k, Jf: n}
}
