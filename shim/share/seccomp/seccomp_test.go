package seccomp

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Calls that are not for the filter kill the process, from whichever place they come.
func TestCalls(t *testing.T) {
	const (
		anonymous = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
		x32       = 1 << 30
	)
	program := filepath.Join(t.TempDir(), "call")
	build := exec.Command("go", "build", "-o", program, "./testdata/call")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, c := range map[string]struct {
		args []int // the first is the call's number
		says string
		dies bool
	}{
		"gettid":       {args: []int{unix.SYS_GETTID}},
		"memory":       {args: []int{unix.SYS_MMAP, 0, 4096, unix.PROT_READ, anonymous}},
		"prctl":        {args: []int{unix.SYS_PRCTL, unix.PR_GET_DUMPABLE}, says: "invalid argument\n"},
		"executable":   {args: []int{unix.SYS_MMAP, 0, 4096, unix.PROT_READ | unix.PROT_EXEC, anonymous}, dies: true},
		"mprotect":     {args: []int{unix.SYS_MPROTECT}, dies: true},
		"fork":         {args: []int{unix.SYS_CLONE, int(unix.SIGCHLD)}, dies: true},
		"fork as mmap": {args: []int{unix.SYS_CLONE, unix.SYS_MMAP}, dies: true}, // the argument is no call's number
		"vfork":        {args: []int{unix.SYS_VFORK}, dies: true},
		"clone3":       {args: []int{unix.SYS_CLONE3}, dies: true},
		"execve":       {args: []int{unix.SYS_EXECVE}, dies: true},
		"socket":       {args: []int{unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_STREAM}, dies: true},
		"mount":        {args: []int{unix.SYS_MOUNT}, dies: true},
		"unshare":      {args: []int{unix.SYS_UNSHARE}, dies: true},
		"by handle":    {args: []int{unix.SYS_OPEN_BY_HANDLE_AT}, dies: true},
		"mknod":        {args: []int{unix.SYS_MKNODAT}, dies: true},
		"io_uring":     {args: []int{unix.SYS_IO_URING_SETUP}, dies: true},
		"x32":          {args: []int{x32 | unix.SYS_READ}, dies: true},
	} {
		cmd := exec.Command(program)
		for _, a := range c.args {
			cmd.Args = append(cmd.Args, strconv.Itoa(a))
		}
		out, err := cmd.Output()
		if !c.dies {
			if err != nil || string(out) != c.says {
				t.Errorf("%s: %v, %q", name, err, out)
			}
			continue
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGSYS {
			t.Errorf("%s: %v, %q", name, err, out)
		}
	}
}
