package snapshotter

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/testfs"
)

// xfsSize is enough for every test that needs reflinks; the image behind it is sparse.
const xfsSize = 2 << 30

func TestMain(m *testing.M) {
	killHere()
	testfs.Main(m)
}

// testConfig is the configuration of a snapshotter below dir.
func testConfig(t testing.TB, dir string) *config.Config {
	t.Helper()
	t.Setenv("CUBE_CONFIG", "/dev/null")
	cfg, err := config.Load("")
	if err != nil {
		t.Fatal(err)
	}
	cfg.StateDir = dir
	cfg.RunDir = filepath.Join(dir, "run")
	return cfg
}

func TestSuite(t *testing.T) {
	for _, fs := range []struct {
		name string
		make func(testing.TB, int64) string
	}{{"xfs", testfs.XFS}, {"ext4", testfs.Ext4}} {
		t.Run(fs.name, func(t *testing.T) {
			dir := fs.make(t, xfsSize)
			cfg := testConfig(t, dir)
			testsuite.SnapshotterSuite(t, Name, func(_ context.Context, root string) (snapshots.Snapshotter, func() error, error) {
				c := *cfg
				c.StateDir = filepath.Join(dir, filepath.Base(filepath.Dir(root)))
				s, err := New(&c, slog.New(slog.DiscardHandler))
				if err != nil {
					return nil, nil, err
				}
				return s, s.Close, nil
			})
		})
	}
}

// TestSuiteProxy runs the suite as containerd talks to the snapshotter: through its socket.
func TestSuiteProxy(t *testing.T) {
	dir := testfs.XFS(t, xfsSize)
	cfg := testConfig(t, dir)
	testsuite.SnapshotterSuite(t, Name, func(_ context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		c := *cfg
		c.StateDir = filepath.Join(dir, filepath.Base(filepath.Dir(root)))
		c.RunDir = root
		conn, stop, err := serve(&c)
		if err != nil {
			return nil, nil, err
		}
		return proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), Name), stop, nil
	})
}

// serve starts Serve and connects to it. stop returns Serve's error.
func serve(cfg *config.Config) (conn *grpc.ClientConn, stop func() error, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- Serve(ctx, cfg, slog.New(slog.DiscardHandler), roomy, func() { close(ready) }) }()
	select {
	case err := <-done:
		cancel()
		return nil, nil, err
	case <-ready:
	case <-time.After(cfg.Timeout(30 * time.Second)):
		cancel()
		return nil, nil, context.DeadlineExceeded
	}
	conn, err = grpc.NewClient("unix://"+cfg.SnapshotterSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	return conn, func() error {
		if conn != nil {
			conn.Close()
		}
		cancel()
		return <-done
	}, err
}

// roomy has room for anything.
func roomy(context.Context) error { return nil }
