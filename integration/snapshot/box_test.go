// Package snapshot tests that running containers are saved and go on, as they were or several times over, with the real
// thing: containerd's client and tools, and machines.
package snapshot

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/shim/snapshots"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

var s *stack.Stack

func TestMain(m *testing.M) { stack.Main(m, &s) }

// counter counts the lines that it reads, in its memory and in a file, and says where it is by both.
const counter = `i=0; while read line; do i=$((i+1)); echo x >>/lines; echo $i $(wc -l </lines); done; exit 3`

// box is a container with a task and the client's ends of its stdio.
type box struct {
	*testing.T
	id   string
	c    containerd.Container
	task containerd.Task
	in   *os.File
	out  *bufio.Reader
	ends <-chan containerd.ExitStatus
}

func connect(t *testing.T) (*containerd.Client, context.Context) {
	t.Helper()
	client, err := containerd.New(s.Config.ContainerdSocket())
	must(t, err)
	t.Cleanup(func() { client.Close() })
	limit := 3 * time.Minute
	if os.Getenv("CUBE_TEST_LONG") != "" {
		limit = 30 * time.Minute
	}
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(context.Background(), s.Config.Containerd.Namespace), s.Config.Timeout(limit))
	t.Cleanup(cancel)
	return client, ctx
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newBox makes a container that has no task yet.
func newBox(t *testing.T, client *containerd.Client, ctx context.Context, name string, opts ...oci.SpecOpts) *box {
	t.Helper()
	b := &box{T: t, id: s.ID(t, name)}
	image, err := client.GetImage(ctx, stack.Image)
	must(t, err)
	opts = append([]oci.SpecOpts{oci.WithImageConfig(image), oci.WithProcessArgs("sh", "-c", counter)}, opts...)
	b.c, err = client.NewContainer(ctx, b.id, containerd.WithImage(image), containerd.WithSnapshotter("cube"),
		containerd.WithNewSnapshot(b.id, image), containerd.WithRuntime("io.cube.v2", nil), containerd.WithNewSpec(opts...))
	must(t, err)
	t.Cleanup(func() {
		if b.task != nil {
			_, _ = b.task.Delete(ctx, containerd.WithProcessKill) // its shim may be gone
		}
		if err := b.c.Delete(ctx, containerd.WithSnapshotCleanup); err != nil {
			t.Error(err)
		}
	})
	return b
}

// create gives it a task, of the checkpoint in a directory or fresh.
func (b *box) create(ctx context.Context, checkpoint string) error {
	b.Helper()
	dir := b.TempDir()
	fifos := cio.NewFIFOSet(cio.Config{Stdin: filepath.Join(dir, "in"), Stdout: filepath.Join(dir, "out")}, nil)
	for _, path := range []string{fifos.Stdin, fifos.Stdout} {
		must(b, syscall.Mkfifo(path, 0o600))
	}
	in, err := os.OpenFile(fifos.Stdin, os.O_RDWR, 0)
	must(b, err)
	out, err := os.OpenFile(fifos.Stdout, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	must(b, err)
	b.Cleanup(func() { in.Close(); out.Close() })
	b.in, b.out = in, bufio.NewReader(out)
	var opts []containerd.NewTaskOpts
	if checkpoint != "" {
		opts = append(opts, containerd.WithRestoreImagePath(checkpoint))
	}
	b.task, err = b.c.NewTask(ctx, func(string) (cio.IO, error) { return held{fifos.Config}, nil }, opts...)
	return err
}

// held is stdio that the test itself has.
type held struct{ config cio.Config }

func (h held) Config() cio.Config { return h.config }
func (held) Cancel()              {}
func (held) Wait()                {}
func (held) Close() error         { return nil }

// run creates and starts the task.
func (b *box) run(ctx context.Context, checkpoint string) *box {
	b.Helper()
	began := time.Now()
	must(b, b.create(ctx, checkpoint))
	created := time.Since(began)
	var err error
	b.ends, err = b.task.Wait(ctx)
	must(b, err)
	must(b, b.task.Start(ctx))
	b.Logf("%s: create %v, start %v", b.id, created.Round(time.Millisecond), (time.Since(began) - created).Round(time.Millisecond))
	status, err := b.task.Status(ctx)
	if err != nil || status.Status != containerd.Running {
		b.Errorf("%s: status %v, %v", b.id, status.Status, err)
	}
	return b
}

// counts has it count a line, which is to be that one in its memory and in its file.
func (b *box) counts(want int) {
	b.Helper()
	b.countsAt("line", want)
}

// countsAt is counts with a line of that text.
func (b *box) countsAt(line string, want int) {
	b.Helper()
	_, err := io.WriteString(b.in, line+"\n")
	must(b, err)
	if line := b.line(); line != fmt.Sprint(want, " ", want) {
		b.Errorf("%s counts %q, want %d twice", b.id, line, want)
	}
}

// line is the next one that it says.
func (b *box) line() string {
	b.Helper()
	type said struct {
		line string
		err  error
	}
	got := make(chan said, 1)
	go func() {
		line, err := b.out.ReadString('\n')
		got <- said{strings.TrimSpace(line), err}
	}()
	select {
	case g := <-got:
		if g.err != nil {
			b.Fatalf("%s says no more than %q: %v", b.id, g.line, g.err)
		}
		return g.line
	case <-time.After(s.Config.Timeout(30 * time.Second)):
		b.Fatalf("%s is silent", b.id)
		return ""
	}
}

// exec runs a command in it and returns what that says.
func (b *box) exec(ctx context.Context, args ...string) string {
	b.Helper()
	var out strings.Builder
	p, err := b.task.Exec(ctx, fmt.Sprintf("e%d", time.Now().UnixNano()), &specs.Process{Args: args, Cwd: "/", Env: []string{"PATH=/usr/bin:/bin"}},
		cio.NewCreator(cio.WithStreams(nil, &out, &out)))
	must(b, err)
	ends, err := p.Wait(ctx)
	must(b, err)
	must(b, p.Start(ctx))
	<-ends
	if _, err := p.Delete(ctx); err != nil {
		b.Error(err)
	}
	return strings.TrimSpace(out.String())
}

// shim is its shim, asked for what containerd can't.
func (b *box) shim(ctx context.Context) *snapshots.Client {
	b.Helper()
	c, err := snapshots.Dial(ctx, s.Config, s.Config.Containerd.Namespace, b.id)
	must(b, err)
	b.Cleanup(func() { c.Close() })
	return c
}

// store has all snapshots of the stack; those that the test has made go with it.
func store(t *testing.T) *snapshot.Store {
	st := snapshot.New(s.Config, slog.New(slog.DiscardHandler))
	t.Cleanup(func() {
		all, err := st.List()
		must(t, err)
		for _, info := range all {
			if info.Damage != "" {
				t.Errorf("snapshot %s: %s", info.ID, info.Damage)
			}
			if _, err := st.Delete(info.ID); err != nil {
				t.Error(err)
			}
		}
		if left, err := st.HalfMade(); err != nil || len(left) > 0 {
			t.Errorf("half made: %v, %v", left, err)
		}
		if left, _ := os.ReadDir(s.Config.DiskDir()); len(left) > 0 {
			t.Errorf("disks are left: %v", left)
		}
	})
	return st
}

// end kills it, and deletes its task.
func (b *box) end(ctx context.Context) {
	b.Helper()
	must(b, b.task.Kill(ctx, syscall.SIGKILL))
	if status := <-b.ends; status.ExitCode() != 137 {
		b.Errorf("%s ended with %v", b.id, status)
	}
	_, err := b.task.Delete(ctx)
	must(b, err)
	b.task = nil
}

// checkpoint has containerd make a checkpoint in a directory.
func (b *box) checkpoint(ctx context.Context, client *containerd.Client) (dir string) {
	b.Helper()
	dir = filepath.Join(b.TempDir(), "checkpoint")
	o, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: dir})
	must(b, err)
	began := time.Now()
	_, err = client.TaskService().Checkpoint(ctx, &tasks.CheckpointTaskRequest{ContainerID: b.id, Options: o})
	must(b, err)
	b.Logf("%s: checkpoint %v", b.id, time.Since(began).Round(time.Millisecond))
	return dir
}
