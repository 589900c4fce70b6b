package enter

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Run does all that s says and executes the command. It returns only on failure, with the process in an unknown state:
// the caller exits. It must be called on the main thread.
func Run(s *Spec) error {
	if err := refuseForeignPrivilege(); err != nil {
		return err
	}
	for _, step := range []struct {
		what string
		do   func(*Spec) error
	}{
		{"arrange descriptors", arrangeDescriptors},
		{"enter the cgroup", enterCgroups},
		{"make namespaces", makeNamespaces},
		{"make the tap", makeTap},
		{"change the root", changeRoot},
		{"set limits", setLimits},
		{"drop privileges", dropPrivileges},
		{"tie to the parent", tieToParent},
	} {
		if err := step.do(s); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	err := unix.Exec(s.Argv[0], s.Argv, nil)
	return fmt.Errorf("execute %s: %w", s.Argv[0], err)
}

// refuseForeignPrivilege makes sure that all privilege is the caller's own: a set-uid or set-gid cube-jail, or one with
// file capabilities, would hand root to whoever can start it.
func refuseForeignPrivilege() error {
	ruid, euid, suid := unix.Getresuid()
	rgid, egid, sgid := unix.Getresgid()
	secure, err := atSecure()
	if err != nil {
		return err
	}
	if secure || ruid != euid || ruid != suid || rgid != egid || rgid != sgid {
		return errors.New("refused: cube-jail must not be set-uid or have capabilities of its own")
	}
	if ruid != 0 {
		return errors.New("refused: only root can make a jail")
	}
	return nil
}

// atSecure reads AT_SECURE from the auxiliary vector (getauxval(3)).
func atSecure() (bool, error) {
	const auxSecure = 23
	aux, err := unix.Auxv()
	if err != nil {
		return false, fmt.Errorf("read the auxiliary vector: %w", err)
	}
	for _, a := range aux {
		if a[0] == auxSecure {
			return a[1] != 0, nil
		}
	}
	return false, nil
}

// arrangeDescriptors turns standard input, on which the specification came, into /dev/null and lets nothing above Keep
// survive the exec.
func arrangeDescriptors(s *Spec) error {
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Dup2(null, 0); err != nil {
		return err
	}
	return unix.CloseRange(uint(s.Keep)+1, ^uint(0)>>33, unix.CLOSE_RANGE_CLOEXEC)
}

// enterCgroups comes first, so that all memory of the machine is its group's. It moves the main thread alone, which
// costs the kernel much less than moving a process; the exec ends the other threads.
func enterCgroups(s *Spec) error {
	for _, fd := range s.Cgroups {
		if _, err := unix.Write(fd, []byte("0")); err != nil {
			return err
		}
	}
	return nil
}

func makeNamespaces(s *Spec) error {
	flags := unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	if s.NetNS == 0 {
		flags |= unix.CLONE_NEWNET
	} else if err := unix.Setns(s.NetNS, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("network: %w", err)
	}
	if err := unix.Unshare(flags); err != nil {
		return err
	}
	return unix.Sethostname([]byte("cube"))
}

// makeTap makes the machine's end of its network, down and connected to nothing. In a namespace of the process's own it
// vanishes with that, some time after the process, which spares the end of the process waiting for it (30 ms). In
// another's it vanishes with its descriptor.
func makeTap(s *Spec) error {
	if s.Tap == 0 {
		return nil
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/net/tun: %w (is the tun module loaded?)", err)
	}
	ifr, err := unix.NewIfreq("tap%d")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return fmt.Errorf("TUNSETIFF: %w", err)
	}
	if s.NetNS == 0 {
		if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1); err != nil {
			return fmt.Errorf("TUNSETPERSIST: %w", err)
		}
	}
	if fd == s.Tap { // dup2 onto itself would leave it close-on-exec
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0)
		return err
	}
	return unix.Dup2(fd, s.Tap)
}

// setLimits leaves fewer descriptors where the launching process may have no more: without CAP_SYS_RESOURCE nobody can
// raise that.
func setLimits(s *Spec) error {
	unix.Umask(0o077)
	files := s.MaxFiles
	err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files})
	if errors.Is(err, unix.EPERM) {
		var have unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &have); err != nil {
			return err
		}
		files = min(files, have.Max)
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files})
	}
	if err != nil {
		return fmt.Errorf("descriptors: %w", err)
	}
	return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
}

// tieToParent has the kernel kill this process when the thread that started it ends. It comes after the change of the
// uid, which clears the setting. The first process of a pid namespace can't tell whether that has already happened; such
// a command has to end when what it is connected to does.
func tieToParent(s *Spec) error {
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return err
	}
	if !s.Init && os.Getppid() != s.Parent {
		return errors.New("the launching process has ended")
	}
	return nil
}
