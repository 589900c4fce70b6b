// Package envd runs the daemon of a sandbox without a sandbox: in namespaces of its own on this machine, under its init.
package envd

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// waitTime bounds waits for what takes a moment on an idle machine.
const waitTime = time.Minute

var (
	buildOnce sync.Once
	buildDir  string
	buildErr  error
)

func TestMain(m *testing.M) {
	code := m.Run()
	if buildDir != "" {
		os.RemoveAll(buildDir)
	}
	os.Exit(code)
}

// binary is cube-envd, of this tree.
func binary(t *testing.T) string {
	t.Helper()
	buildOnce.Do(func() {
		if buildDir, buildErr = os.MkdirTemp("", "cube-envd-test-"); buildErr != nil {
			return
		}
		c := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", buildDir, "github.com/cubesandbox/cube/cmd/cube-envd")
		c.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := c.CombinedOutput(); err != nil {
			buildErr = fmt.Errorf("%w\n%s", err, out)
		}
	})
	if buildErr != nil {
		t.Fatal(buildErr)
	}
	return filepath.Join(buildDir, "cube-envd")
}

// box is a machine as the daemon sees one.
type box struct {
	t    *testing.T
	init *exec.Cmd
	log  *log
	done chan struct{} // closed: the init has ended
}

// log is what the init and those below it write.
type log struct {
	mu  sync.Mutex
	all bytes.Buffer
	new chan struct{}
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case l.new <- struct{}{}:
	default:
	}
	return l.all.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.String()
}

// newBox starts one; the arguments are the init's.
func newBox(t *testing.T, args ...string) *box {
	t.Helper()
	return newBoxIn(t, "", args...)
}

// newBoxIn starts one whose control group is the one that is given, if there is one.
func newBoxIn(t *testing.T, cgroup string, args ...string) *box {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: namespaces take root")
	}
	dir := t.TempDir()
	for name, content := range map[string]string{
		"passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:4321:4321::/home/user:/bin/bash\n",
		"group":  "root:x:0:\ntty:x:5:\nsudo:x:27:user\nuser:x:4321:\nshared:x:4322:root,user\n",
	} {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644))
	}
	b := &box{t: t, log: &log{new: make(chan struct{}, 1)}, done: make(chan struct{})}
	b.init = exec.Command("./box.sh", append([]string{binary(t), dir}, args...)...)
	b.init.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "FROM_IMAGE=yes"}
	b.init.Stdout, b.init.Stderr = b.log, b.log
	b.init.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Pdeathsig:  unix.SIGKILL,
	}
	if cgroup != "" {
		group, err := os.Open(cgroup)
		must(t, err)
		defer group.Close()
		b.init.SysProcAttr.UseCgroupFD, b.init.SysProcAttr.CgroupFD = true, int(group.Fd())
		b.init.Env = append(b.init.Env, "OWN_CGROUP=yes")
	}
	started := make(chan error)
	go func() {
		// The init is killed when the thread ends that has started it, as threads do that have been in the box's network.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		started <- b.init.Start()
		_ = b.init.Wait()
		close(b.done)
	}()
	must(t, <-started)
	t.Cleanup(func() {
		_ = b.init.Process.Kill()
		<-b.done
		if t.Failed() {
			t.Log(b.log)
		}
	})
	b.waitLog("envd serves")
	return b
}

// waitLog waits until the text has been written.
func (b *box) waitLog(text string) {
	b.t.Helper()
	deadline := time.After(waitTime)
	for !strings.Contains(b.log.String(), text) {
		select {
		case <-b.log.new:
		case <-b.done:
			b.t.Fatalf("the box has ended without %q:\n%s", text, b.log)
		case <-deadline:
			b.t.Fatalf("no %q:\n%s", text, b.log)
		}
	}
}

// command is one in the box's network. With all it is in all of the box.
func (b *box) command(all bool, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), 5*waitTime)
	b.t.Cleanup(cancel)
	in := []string{"-t", fmt.Sprint(b.init.Process.Pid), "-n"}
	if all {
		in = append(in, "-m", "-p")
	}
	return exec.CommandContext(ctx, "nsenter", append(append(in, "--"), args...)...)
}

// run runs a command in the box and returns what it writes.
func (b *box) run(args ...string) string {
	b.t.Helper()
	out, err := b.command(true, args...).CombinedOutput()
	if err != nil {
		b.t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
