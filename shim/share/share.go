// Package share gives a container files of the host: those of its spec's bind mounts. A helper process per container,
// cube-share, serves them over 9P2000.L (package ninep), one connection for each; the caller relays the connections to the
// guest, whose kernel has the client. This is the launching side.
//
// The helper is what a hostile guest talks to, so it gets little: a jail (package jail) with a uid, a pid, a network and
// other namespaces of its own, a root file system that consists of the shared trees and nothing else, a system call filter
// (package seccomp), limits on memory, CPU time and tasks. It must do to these trees what root in the container may do to
// its files, whoever they belong to. Therefore it keeps the capabilities CAP_DAC_OVERRIDE (read and write them), CAP_CHOWN
// (give a file that a guest's user makes to that user), CAP_FOWNER and CAP_FSETID (modes and times of files of all users)
// as ambient ones; where everything is shared read-only, CAP_DAC_READ_SEARCH alone. With a root that holds only what is
// shared, they open nothing else.
//
// How a caller uses it, per container with shares:
//
//	s, err := share.Start(ctx, share.Config{…, Record: func(r share.Record) error { /* write it to the bundle's state */ }})
//	for i, c := range s.Conns() { /* relay c to a stream of the guest: it and s.Files()[i] are the agent's Share i */ }
//	<-s.Done()     // the helper has ended, by itself if before Close: log it; the guest sees I/O errors
//	err = s.Close() // after DeleteContainer, or to undo a failed create
//
// After a kill -9 of the caller the helper ends by itself, and share.Cleanup with the last Record frees what it held.
package share

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/share/ninep"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/jail"
	"github.com/cubesandbox/cube/vmm/record"
)

const (
	// MaxShares is how many a container may have.
	MaxShares = 64
	// startTimeout bounds the helper's start, which takes some 10 ms.
	startTimeout = 10 * time.Second
	// endTimeout bounds the removal of what a helper that has been killed held.
	endTimeout = 2 * time.Second

	// The helper's limits, see limits.
	memory         = 64 << 20
	memoryPerShare = 4 << 20
	tasks          = 32
	tasksPerShare  = 2
	cpus           = 1
	// files is two for each fid, and what connections and the Go runtime need.
	files = 2*ninep.MaxFIDs + 4*MaxShares
)

// Config is what a container needs served.
type Config struct {
	Host *config.Config
	// ID is the container's, for names that people read; Dir, its bundle, tells apart containers of one id.
	ID, Dir string
	// Shares has at least one element and at most MaxShares.
	Shares []spec.Share
	// Memory is the container's, in bytes: what the guest writes to a tmpfs of the host counts against it.
	Memory int64
	// Record is called with all that the helper holds, before anything of it is acquired. When it returns without error,
	// its argument must be what a later Cleanup will be called with.
	Record func(Record) error
	Log    *slog.Logger
}

// Server is a helper that runs.
type Server struct {
	cfg    Config
	proc   *jail.Process
	conns  []net.Conn
	files  []string
	output *output

	end     sync.Once
	endErr  error
	release undo.Stack
}

// Start returns when the helper serves. On error nothing is left.
//
// A source is opened here, once, as a mount of its own: whatever happens to its path afterwards, this file or directory and
// no other is served.
func Start(ctx context.Context, cfg Config) (_ *Server, err error) {
	if len(cfg.Shares) == 0 || len(cfg.Shares) > MaxShares {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(
			"%d bind mounts of host files; a container may have %d", len(cfg.Shares), MaxShares))
	}
	s := &Server{cfg: cfg}
	var u undo.Stack
	defer u.Run(&err)

	trees, err := openTrees(cfg)
	if err != nil {
		return nil, err
	}
	defer closeTrees(trees)
	for _, t := range trees[:len(cfg.Shares)] {
		_, file, _ := strings.Cut(t.Path, "/")
		s.files = append(s.files, file)
	}
	rec := Record{Dir: cfg.Dir, Cgroup: cgroupName(cfg)}
	uids := jail.NewUIDs(cfg.Host)
	rec.UID, err = uids.Take(cfg.Dir, func(uid uint32) error {
		rec.UID = uid
		return cfg.Record(rec)
	})
	if err != nil {
		return nil, err
	}
	s.hold(&u, func() error { return uids.Release(rec.UID, cfg.Dir) })
	group, err := cgroup.Create(ctx, rec.Cgroup, limits(cfg), cfg.Log)
	if err != nil {
		return nil, err
	}
	s.hold(&u, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), cfg.Host.Timeout(endTimeout))
		defer cancel()
		return group.Remove(ctx)
	})
	cmd := &jail.Command{
		Launcher: cfg.Host.Bin("cube-jail"),
		Name:     "share " + cfg.ID,
		Root:     cfg.Host.RunDir,
		Trees:    trees,
		Argv:     []string{"/" + program, strconv.Itoa(len(cfg.Shares))},
		UID:      rec.UID,
		Cgroup:   group,
		PIDNS:    true,
		Caps:     capabilities(cfg.Shares),
		MaxFiles: files,
	}
	s.hold(&u, s.closeConns)
	ready, err := s.launch(cmd, func(pid int) error {
		id, err := process.Of(pid)
		if err != nil {
			return err
		}
		rec.Helper = id
		return cfg.Record(rec)
	})
	if err != nil {
		return nil, err
	}
	s.hold(&u, func() error { s.proc.Kill(); <-s.proc.Done(); return nil })
	defer ready.Close()
	return s, s.awaitReady(ctx, ready)
}

// hold pushes what undoes a failed start and what Close does.
func (s *Server) hold(u *undo.Stack, f func() error) {
	u.Push(f)
	s.release.Push(f)
}

// launch starts the helper. ready is the end of a pipe that gets a byte when it serves and ends when it does.
func (s *Server) launch(cmd *jail.Command, started func(pid int) error) (ready *os.File, err error) {
	defer func() {
		for _, f := range cmd.Files { // the helper's ends
			_ = f.Close()
		}
	}()
	for range s.cfg.Shares {
		conn, file, err := socketpair()
		if err != nil {
			return nil, err
		}
		s.conns, cmd.Files = append(s.conns, conn), append(cmd.Files, file)
	}
	ready, word, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Files = append(cmd.Files, word)
	out, in, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, ready.Close())
	}
	defer in.Close()
	cmd.Output = in
	s.output = readOutput(out, s.cfg.Log.With("helper", "cube-share", "id", s.cfg.ID))
	if s.proc, err = cmd.Start(started); err != nil {
		return nil, errors.Join(err, ready.Close())
	}
	return ready, nil
}

func (s *Server) awaitReady(ctx context.Context, ready *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Host.Timeout(startTimeout))
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Unix(1, 0)) })()
	_, err := io.ReadFull(ready, make([]byte, 1))
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("share files of the host: cube-share has not started: %w", ctx.Err())
	}
	if s.proc.Wait(ctx) != nil {
		return fmt.Errorf("share files of the host: cube-share: %w", err)
	}
	return fmt.Errorf("share files of the host: %s (%s)", s.output.last(ctx), s.proc.Status())
}

// PID is the helper's on the host.
func (s *Server) PID() int { return s.proc.PID() }

// Conns are the connections for the guest, one per share, in their order. The server closes them.
func (s *Server) Conns() []net.Conn { return s.conns }

// Files are, in the same order, the names of the only file that a share has where it is one of a file, "" where it is a
// directory.
func (s *Server) Files() []string { return s.files }

// Done is closed when the helper has ended.
func (s *Server) Done() <-chan struct{} { return s.proc.Done() }

// Status says how the helper ended. Only after Done.
func (s *Server) Status() string { return s.proc.Status() }

// Close ends the helper and frees all that it held. What the guest has written is in the host's files by then; it holds
// nothing back. It may be called again.
func (s *Server) Close() error {
	s.end.Do(func() { s.endErr = s.release.Release() })
	return s.endErr
}

func (s *Server) closeConns() error {
	for _, c := range s.conns {
		_ = c.Close()
	}
	return nil
}

// limits bound what a hostile guest can make the helper use. The buffers of a connection take 1 MiB, and the host's kernel
// keeps inodes for the files that the guest holds on to.
func limits(cfg Config) cgroup.Limits {
	n := int64(len(cfg.Shares))
	return cgroup.Limits{CPUs: cpus, Memory: memory + n*memoryPerShare + cfg.Memory, PIDs: tasks + n*tasksPerShare}
}

func capabilities(shares []spec.Share) []int {
	for _, s := range shares {
		if !s.ReadOnly {
			return []int{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID}
		}
	}
	return []int{unix.CAP_DAC_READ_SEARCH}
}

func cgroupName(cfg Config) string { return "share-" + record.CgroupName(cfg.Host, cfg.Dir, cfg.ID) }

func socketpair() (net.Conn, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a connection for shared files: %w", err)
	}
	host, helper := os.NewFile(uintptr(pair[0]), "share"), os.NewFile(uintptr(pair[1]), "share")
	defer host.Close() // FileConn has its own duplicate
	c, err := net.FileConn(host)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make a connection for shared files: %w", err), helper.Close())
	}
	return c, helper, nil
}
