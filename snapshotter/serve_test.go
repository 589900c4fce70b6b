package snapshotter

import (
	"context"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	diffapi "github.com/containerd/containerd/api/services/diff/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/diff"
	diffproxy "github.com/containerd/containerd/v2/core/diff/proxy"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/testfs"
)

func TestServe(t *testing.T) {
	cfg := testConfig(t, testfs.XFS(t, xfsSize))
	cfg.RunDir = t.TempDir()
	// A socket that a killed server left.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: cfg.SnapshotterSocket()}); err != nil {
		t.Fatal(err)
	}
	conn, stop, err := serve(cfg)
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(cfg.SnapshotterSocket())
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", st.Mode(), err)
	}

	ctx := context.Background()
	sn := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), Name)
	fresh, err := sn.Prepare(ctx, "a", "")
	if err != nil {
		t.Fatal(err)
	}
	mark(t, fresh[0].Source)
	wantErr(t, sn.Commit(ctx, "c", "a"), errdefs.IsFailedPrecondition, guestmark.Refusal)
	written, err := sn.Mounts(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}

	d := diffproxy.NewDiffApplier(diffapi.NewDiffClient(conn)).(interface {
		diff.Comparer
		diff.Applier
	})
	other := []mount.Mount{{Type: "overlay", Source: "overlay"}, {Type: "bind", Source: t.TempDir()}, {Type: "ext4", Source: "/none"}}
	for name, m := range map[string][]mount.Mount{"mounts of before the mark": fresh, "mounts": written, "among others": append(other, written...)} {
		_, err = d.Compare(ctx, other, m)
		wantErr(t, err, errdefs.IsFailedPrecondition, guestmark.Refusal, m[len(m)-1].Source)
		_, err = d.Compare(ctx, m, other)
		wantErr(t, err, errdefs.IsFailedPrecondition, guestmark.Refusal)
		if _, err = d.Apply(ctx, ocispec.Descriptor{}, m); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("apply to %s: %v", name, err)
		}
	}
	clean, err := sn.Prepare(ctx, "b", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err = d.Compare(ctx, other, clean); !errdefs.IsNotImplemented(err) {
		t.Errorf("compare: %v", err)
	}
	if _, err = d.Apply(ctx, ocispec.Descriptor{}, clean); !errdefs.IsNotImplemented(err) {
		t.Errorf("apply: %v", err)
	}

	if err := sn.Remove(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	if err := sn.(interface{ Cleanup(context.Context) error }).Cleanup(ctx); err != nil {
		t.Fatal(err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(cfg.SnapshotterSocket()); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
}

func TestServeRefusesALiveSocket(t *testing.T) {
	cfg := testConfig(t, testfs.XFS(t, xfsSize))
	cfg.RunDir = t.TempDir()
	l, err := net.Listen("unix", cfg.SnapshotterSocket())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err = Serve(ctx, cfg, slog.New(slog.DiscardHandler), roomy, func() { t.Error("ready") })
	wantErr(t, err, func(error) bool { return true }, "another process answers", "cube down")
}
