package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/containerd/v2/version"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/internal/config"
)

// namespace is the containerd namespace of all containers.
const namespace = "conformance"

// limit bounds every single step on a host at scale 1, but for one that may have to boot a machine first.
const (
	limit     = 60 * time.Second
	bootLimit = 3 * limit
)

// daemon is what a shim sees of containerd: directories, an environment and a service that takes events.
type daemon struct {
	binary string
	cfg    *config.Config
	stack  stack.Stack // only for its leaks
	host   *host       // where its shims run; nil: on the real one, with machines that have no network
	events *recorder
	server *ttrpc.Server
	env    []string
	ids    atomic.Int64
	images images
}

// newDaemon makes one for a shim's binary.
func newDaemon(binary string) (*daemon, error) {
	dir, err := os.MkdirTemp("/var/tmp", "cube-conf-")
	if err != nil {
		return nil, err
	}
	d := &daemon{binary: binary, events: newRecorder(), stack: stack.Stack{Dir: dir}, images: images{dir: dir}}
	artefacts, err := pinned(dir)
	if err != nil {
		return nil, err
	}
	text := fmt.Sprintf("state_dir = %q\nrun_dir = %q\nartefacts = %q\n[network]\ndns_upstreams = [%q]\n",
		filepath.Join(dir, "state"), "/run/"+filepath.Base(dir), artefacts, testhost.Resolver)
	if err := os.WriteFile(d.configFile(), []byte(text), 0o600); err != nil {
		return nil, err
	}
	if d.cfg, err = config.Load(d.configFile()); err != nil {
		return nil, err
	}
	d.stack.Config = d.cfg
	for _, dir := range []string{d.cfg.RunDir, d.cfg.StoreDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("unix", d.eventSocket())
	if err != nil {
		return nil, err
	}
	if d.server, err = ttrpc.NewServer(); err != nil {
		return nil, err
	}
	eventsapi.RegisterTTRPCEventsService(d.server, d.events)
	go d.server.Serve(context.Background(), l) // ends with close
	d.env = append(os.Environ(), "GOMAXPROCS=2", "MAX_SHIM_VERSION=2", config.FileEnv+"="+d.configFile(),
		"TTRPC_ADDRESS="+d.eventSocket(), "GRPC_ADDRESS="+d.grpcAddress(), "NAMESPACE="+namespace)
	if !d.fake() {
		if d.host, err = newHost(d.cfg, d.configFile()); err != nil {
			return nil, errors.Join(err, d.close())
		}
		d.stack.Host = d.host.Host
	}
	return d, nil
}

// pinned is a directory with the artefacts that are in use, which stay the same whatever set-up does meanwhile: a new
// guest would have to be booted in the middle of a row.
func pinned(dir string) (string, error) {
	installed := os.Getenv("CUBE_ARTEFACTS")
	if installed == "" {
		installed = filepath.Join(config.Default().StateDir, "artefacts")
	}
	artefacts := filepath.Join(dir, "artefacts")
	for _, kind := range []string{"qemu", "guest"} {
		current, err := filepath.EvalSymlinks(filepath.Join(installed, kind, "current"))
		if errors.Is(err, fs.ErrNotExist) {
			continue // runTable says what is missing
		}
		if err != nil {
			return "", err
		}
		if err := os.MkdirAll(filepath.Join(artefacts, kind), 0o755); err != nil {
			return "", err
		}
		if err := os.Symlink(current, filepath.Join(artefacts, kind, "current")); err != nil {
			return "", err
		}
	}
	return artefacts, nil
}

func (d *daemon) fake() bool { return filepath.Base(d.binary) == "containerd-shim-fake" }

func (d *daemon) configFile() string { return filepath.Join(d.stack.Dir, "config.toml") }

func (d *daemon) eventSocket() string { return filepath.Join(d.cfg.RunDir, "containerd.sock.ttrpc") }

// grpcAddress is where containerd would be; a shim only makes a name of it.
func (d *daemon) grpcAddress() string { return filepath.Join(d.cfg.RunDir, "containerd.sock") }

func (d *daemon) sockets() string { return filepath.Join(d.cfg.RunDir, "s") }

// close ends the daemon and says what is left of the shims. There are some where the tests were interrupted: they are
// told to end, with their machines.
func (d *daemon) close() error {
	errs := []error{d.server.Close()}
	if d.host != nil {
		errs = append(errs, d.host.stop())
	}
	leaks := d.leaks()
	for _, p := range d.stack.Processes(filepath.Base(d.binary)) {
		errs = append(errs, unix.Kill(p.PID, unix.SIGTERM))
	}
	for end := time.Now().Add(d.cfg.Timeout(5 * time.Second)); len(leaks) > 0 && time.Now().Before(end); leaks = d.leaks() {
		time.Sleep(20 * time.Millisecond) // what has been killed may still be on its way out
	}
	for _, l := range leaks {
		errs = append(errs, fmt.Errorf("left behind: %s", l))
	}
	if d.host != nil {
		errs = append(errs, d.host.close())
	}
	return errors.Join(append(errs, os.RemoveAll(d.stack.Dir), os.RemoveAll(d.cfg.RunDir))...)
}

func (d *daemon) leaks() []string {
	leaks := d.stack.Leaks()
	for _, dir := range []string{d.sockets(), filepath.Join(d.cfg.RunDir, "pods")} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			leaks = append(leaks, "file: "+filepath.Join(dir, e.Name()))
		}
	}
	return leaks
}

// context bounds one step of a test, clean-up included.
func (d *daemon) context(t testing.TB) context.Context { return d.within(t, limit) }

func (d *daemon) within(t testing.TB, limit time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d.cfg.Timeout(limit))
	t.Cleanup(cancel)
	return ctx
}

// command is one call of the binary by containerd.
func (d *daemon) command(ctx context.Context, id, bundle, action string, flags ...string) *exec.Cmd {
	args := append([]string{"-namespace", namespace, "-address", d.grpcAddress(), "-publish-binary", "/usr/bin/containerd", "-id", id}, flags...)
	args = append(args, action)
	cmd := exec.CommandContext(ctx, d.binary, args...)
	if d.host != nil {
		cmd = exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + d.host.Path(), "--", d.binary}, args...)...)
	}
	cmd.Dir, cmd.Env = bundle, d.env
	return cmd
}

// start is containerd's: whatever comes on stdout and stderr must be the one message.
func (d *daemon) start(ctx context.Context, id, bundle string) (*bootapi.BootstrapResult, error) {
	sockets := d.sockets()
	params, err := proto.Marshal(&bootapi.BootstrapParams{
		InstanceID: id, Namespace: namespace, LogLevel: bootapi.LogLevel_LOG_LEVEL_DEBUG, ContainerdVersion: version.Version,
		ContainerdGrpcAddress: d.grpcAddress(), ContainerdTtrpcAddress: d.eventSocket(), ContainerdBinary: "/usr/bin/containerd",
		SocketDir: &sockets,
	})
	if err != nil {
		return nil, err
	}
	cmd := d.command(ctx, id, bundle, "start")
	cmd.Stdin = bytes.NewReader(params)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("shim start: %w: %s", err, out)
	}
	r := &bootapi.BootstrapResult{}
	if err := proto.Unmarshal(out, r); err != nil {
		return nil, fmt.Errorf("shim start answers %q: %w", out, err)
	}
	return r, nil
}

// delete is containerd's, too. What the shim has to say goes to stderr.
func (d *daemon) delete(ctx context.Context, id, bundle string) (r *taskapi.DeleteResponse, stderr string, err error) {
	cmd := d.command(ctx, id, bundle, "delete", "-bundle", bundle)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, "", fmt.Errorf("shim delete: %w: %s", err, errs.String())
	}
	r = &taskapi.DeleteResponse{}
	return r, errs.String(), proto.Unmarshal(out.Bytes(), r)
}
