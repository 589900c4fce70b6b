package seccomp

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const anonymous = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS

// calls are made by the test binary under the filter. Those that are not for it must kill it.
var calls = map[string]struct {
	args [6]uintptr // the first is the call's number
	dies bool
}{
	"gettid":       {args: [6]uintptr{unix.SYS_GETTID}},
	"memory":       {args: [6]uintptr{unix.SYS_MMAP, 0, 4096, unix.PROT_READ, anonymous}},
	"prctl":        {args: [6]uintptr{unix.SYS_PRCTL, unix.PR_GET_DUMPABLE}},
	"executable":   {args: [6]uintptr{unix.SYS_MMAP, 0, 4096, unix.PROT_READ | unix.PROT_EXEC, anonymous}, dies: true},
	"mprotect":     {args: [6]uintptr{unix.SYS_MPROTECT}, dies: true},
	"fork":         {args: [6]uintptr{unix.SYS_CLONE, uintptr(unix.SIGCHLD)}, dies: true},
	"fork as mmap": {args: [6]uintptr{unix.SYS_CLONE, unix.SYS_MMAP}, dies: true}, // the argument is no call's number
	"vfork":        {args: [6]uintptr{unix.SYS_VFORK}, dies: true},
	"execve":       {args: [6]uintptr{unix.SYS_EXECVE}, dies: true},
	"socket":       {args: [6]uintptr{unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_STREAM}, dies: true},
	"mount":        {args: [6]uintptr{unix.SYS_MOUNT}, dies: true},
	"unshare":      {args: [6]uintptr{unix.SYS_UNSHARE}, dies: true},
	"by handle":    {args: [6]uintptr{unix.SYS_OPEN_BY_HANDLE_AT}, dies: true},
	"mknod":        {args: [6]uintptr{unix.SYS_MKNODAT}, dies: true},
	"x32":          {args: [6]uintptr{1<<30 | unix.SYS_READ}, dies: true},
}

const callEnv = "CUBE_TEST_CALL"

func TestMain(m *testing.M) {
	name := os.Getenv(callEnv)
	if name == "" {
		os.Exit(m.Run())
	}
	err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	if err == nil {
		err = Install()
	}
	if err != nil {
		println(err.Error())
		os.Exit(2)
	}
	a := calls[name].args
	_, _, errno := unix.RawSyscall6(a[0], a[1], a[2], a[3], a[4], ^uintptr(0), 0)
	if errno != 0 && (name != "prctl" || errno != unix.EINVAL) {
		println(errno.Error())
		os.Exit(2)
	}
	// The runtime's own: threads, timers, a collection.
	done := make(chan bool)
	for range 20 {
		go func() {
			runtime.LockOSThread()
			time.Sleep(time.Millisecond)
			runtime.GC()
			done <- true
		}()
	}
	for range 20 {
		<-done
	}
	os.Exit(0)
}

func TestCalls(t *testing.T) {
	for name, c := range calls {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), callEnv+"="+name)
		cmd.Stderr = os.Stderr
		err := cmd.Run()
		if !c.dies {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGSYS {
			t.Errorf("%s: %v", name, err)
		}
	}
}
