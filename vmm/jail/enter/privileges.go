package enter

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// dropPrivileges leaves a process with a uid of its own, no group but its own, the capabilities of s.Caps and no way to
// any other. These are ambient, since a command that isn't root gets no others when it is executed; the bounding set, which
// doesn't count for them, is empty.
func dropPrivileges(s *Spec) error {
	// A new session keyring, without a name: that of the launching process is root's.
	if _, err := unix.KeyctlInt(unix.KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0); err != nil && !errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("session keyring: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("ambient set: %w", err)
	}
	// What is to be ambient must be inheritable, and nothing becomes that once it isn't in the bounding set.
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData // the first has capabilities 0 to 31
	if err := unix.Capget(&header, &caps[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	var keep uint32
	for _, c := range s.Caps {
		keep |= 1 << c
	}
	caps[0].Inheritable, caps[1].Inheritable = keep, 0
	if err := unix.Capset(&header, &caps[0]); err != nil {
		return fmt.Errorf("inheritable set: %w", err)
	}
	for c := uintptr(0); ; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) && c > unix.CAP_AUDIT_READ { // beyond the kernel's last one
			break
		}
		if err != nil {
			return fmt.Errorf("bounding set: %w", err)
		}
	}
	// The change of the uid takes permitted capabilities away unless told not to; the exec ends the setting.
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("keep capabilities: %w", err)
	}
	// Straight to the kernel: the library would change all threads, and wait for them, where only the one that executes
	// the command matters.
	uid := uintptr(s.UID)
	for _, c := range []struct {
		what    string
		nr      uintptr
		a, b, c uintptr
	}{
		{"setgroups", unix.SYS_SETGROUPS, 0, 0, 0},
		{"setresgid", unix.SYS_SETRESGID, uid, uid, uid},
		{"setresuid", unix.SYS_SETRESUID, uid, uid, uid},
	} {
		if _, _, errno := unix.RawSyscall(c.nr, c.a, c.b, c.c); errno != 0 {
			return fmt.Errorf("%s: %w", c.what, errno)
		}
	}
	caps = [2]unix.CapUserData{{Effective: keep, Permitted: keep, Inheritable: keep}}
	if err := unix.Capset(&header, &caps[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	for _, c := range s.Caps {
		if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uintptr(c), 0, 0); err != nil {
			return fmt.Errorf("ambient capability %d: %w", c, err)
		}
	}
	return nil
}
