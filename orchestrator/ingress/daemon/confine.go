package daemon

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// wantFiles is how many descriptors the process would have.
	wantFiles = 1 << 18
	// spareFiles are for all but clients; each of these may need another one to its sandbox.
	spareFiles = 256
)

// raiseLimit has the process have many descriptors, and returns for how many clients at a time that is enough.
func raiseLimit() (clients int, err error) {
	var now unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &now); err != nil {
		return 0, fmt.Errorf("limit of descriptors: %w", err)
	}
	want := unix.Rlimit{Cur: max(now.Max, wantFiles), Max: max(now.Max, wantFiles)}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &want); err != nil { // only root can, where that is more than now.Max
		want.Cur, want.Max = now.Max, now.Max
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &want); err != nil {
			return 0, fmt.Errorf("limit of descriptors: %w", err)
		}
	}
	if want.Cur < 4*spareFiles {
		return 0, fmt.Errorf("the limit of descriptors is %d, at least %d are needed", want.Cur, 4*spareFiles)
	}
	return int(min(want.Cur, wantFiles)-spareFiles) / 2, nil
}

// confine leaves the process nothing of the file system but dir, its uid and gid alone, and no way to any privilege. It returns
// where dir is then. Whoever isn't root has nothing to give up, and stays where he is.
func confine(dir string, uid uint32) (string, error) {
	if os.Geteuid() != 0 {
		return dir, nil
	}
	_ = time.Now().String() // reads the time zone, which can't be found later
	if err := unix.Chroot(dir); err != nil {
		return "", fmt.Errorf("chroot %s: %w", dir, err)
	}
	if err := unix.Chdir("/"); err != nil {
		return "", err
	}
	// These are of threads, and the runtime has several: each call is made by all of them.
	for c := uintptr(0); ; c++ {
		_, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0)
		if errno == unix.EINVAL && c > unix.CAP_AUDIT_READ { // beyond the kernel's last one
			break
		}
		if errno != 0 {
			return "", fmt.Errorf("bounding set: %w", errno)
		}
	}
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return "", fmt.Errorf("no_new_privs: %w", errno)
	}
	id := int(uid)
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(id, id, id), syscall.Setresuid(id, id, id)); err != nil {
		return "", fmt.Errorf("uid %d: %w", uid, err)
	}
	if err := unix.Setuid(0); err == nil {
		return "", errors.New("root's privileges are still there")
	}
	return "/", nil
}
