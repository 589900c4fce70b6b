package conformance

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/testnet"
)

const noNetwork = "a fake guest has no network"

// The rows share a container that may reach all that is outside.
var networkRows = []row{
	{name: "Loopback", test: loopback, shared: true, noFake: noNetwork},
	{name: "OutboundTCP", test: outboundTCP, shared: true, noFake: noNetwork},
	{name: "OutboundUDP", test: outboundUDP, shared: true, noFake: noNetwork},
	{name: "DNS", test: lookup, shared: true, noFake: noNetwork},
	{name: "InboundListen", test: inboundListen, shared: true, noFake: noNetwork},
}

// onNetwork has a container's shim open a place in the network for it.
func onNetwork(s *specs.Spec) {
	s.Annotations = map[string]string{"io.cube.network": `{"policy":{"default":"allow"}}`}
}

func loopback(b *box) {
	const script = "nc -l -p 5000 -e echo hello & i=0; until nc 127.0.0.1 5000; do i=$((i+1)); [ $i -lt 100 ] || exit 1; done"
	b.exec(both(script)).started().ends(0, "hello\n")
}

func outboundTCP(b *box) {
	b.exec(both(fmt.Sprintf("echo hello | nc %s %d", testhost.Server, testhost.DataPort))).started().ends(0, "hello\n")
}

// outboundUDP: nslookup sends one datagram to a port that isn't a name server's, and its echo is an answer.
func outboundUDP(b *box) {
	b.looksUp(fmt.Sprintf("%s:%d", testhost.Server, testhost.EchoPort), "Non-authoritative answer:\n")
}

// lookup asks the name server that the container is told of.
func lookup(b *box) { b.looksUp("", fmt.Sprintf("Name:\tserver.test\nAddress: %s\n", testhost.Server)) }

// looksUp has nslookup ask a server, the container's own if none is given.
func (b *box) looksUp(server, want string) {
	b.Helper()
	p := b.exec(both("nslookup -type=a server.test " + server)).started()
	got := string(p.output())
	if !strings.Contains(got, want) {
		b.Errorf("nslookup says %q, want %q in it", got, want)
	}
	p.ends(0, got)
}

// inboundListen: the host reaches a port that the container listens at.
func inboundListen(b *box) {
	p := b.exec(both("exec nc -l -p 5001 -e cat")).started()
	to := netip.AddrPortFrom(b.place().Address, 5001).String()
	var c net.Conn
	b.d.stack.Eventually(b.T, limit, "somebody listens", func() bool {
		var err error
		c, err = onHost(b, func(*network.Network) (net.Conn, error) { return net.DialTimeout("tcp4", to, b.d.cfg.Timeout(limit)) })
		return err == nil
	})
	defer c.Close()
	b.must(c.SetDeadline(time.Now().Add(b.d.cfg.Timeout(limit))))
	_, err := c.Write([]byte("hello\n"))
	b.must(err)
	if got, err := bufio.NewReader(c).ReadString('\n'); got != "hello\n" {
		b.Errorf("the container answers %q, %v", got, err)
	}
	b.must(c.Close())
	p.ends(0, "")
}

// place is the container's in the network.
func (b *box) place() *network.Attachment {
	b.Helper()
	a, err := onHost(b, func(n *network.Network) (*network.Attachment, error) {
		return n.Find(b.d.context(b.T), namespace, b.id)
	})
	b.must(err)
	return a
}

// onHost calls f with the network of the host that the shims run on.
func onHost[T any](b *box, f func(*network.Network) (T, error)) (v T, err error) {
	err = b.d.host.Do(func() (err error) {
		v, err = f(network.New(b.d.cfg))
		return err
	})
	return v, err
}

// host is a host with the network that `cube up` would have there.
type host struct {
	*testhost.Host
	cfg    *config.Config
	daemon *exec.Cmd  // the network's
	ended  chan error // how it has
}

// newHost returns when the network is up. The configuration is that in the file.
func newHost(cfg *config.Config, file string) (_ *host, err error) {
	h := &host{cfg: cfg, ended: make(chan error, 1)}
	if h.Host, err = testhost.New(); err != nil {
		return nil, err
	}
	if err := h.start(file); err != nil {
		return nil, errors.Join(fmt.Errorf("start the network's daemon: %w", err), h.close())
	}
	return h, nil
}

// start starts the daemon, which is killed with the tests, and not before by what interrupts them.
func (h *host) start(file string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	said, out, err := os.Pipe()
	if err != nil {
		return err
	}
	defer said.Close()
	h.daemon = h.Command(self)
	h.daemon.Env = append(os.Environ(), testnet.DaemonEnv+"="+file)
	h.daemon.Stdout, h.daemon.Stderr = out, os.Stderr
	h.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // with the thread that has started it, the daemon would be killed
		err := h.daemon.Start()
		started <- err
		if err == nil {
			h.ended <- h.daemon.Wait()
		}
	}()
	if err := errors.Join(<-started, out.Close()); err != nil {
		return err
	}
	if err := said.SetReadDeadline(time.Now().Add(h.cfg.Timeout(limit))); err != nil {
		return errors.Join(err, h.stop())
	}
	if _, err := bufio.NewReader(said).ReadString('\n'); err != nil {
		return errors.Join(fmt.Errorf("it doesn't come up: %w", err), h.stop())
	}
	return nil
}

// stop ends the daemon; the network stays.
func (h *host) stop() error {
	_ = h.daemon.Process.Signal(syscall.SIGTERM) // it may have ended
	timer := time.AfterFunc(h.cfg.Timeout(limit), func() { _ = h.daemon.Process.Kill() })
	defer timer.Stop()
	if err := <-h.ended; err != nil {
		return fmt.Errorf("the network's daemon has ended: %w", err)
	}
	return nil
}

// close takes the network down, without its daemon, and lets go of the host. It says what is left there.
func (h *host) close() error {
	errs := []error{h.Do(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), h.cfg.Timeout(limit))
		defer cancel()
		return errors.Join(network.New(h.cfg).Down(ctx), gateway.Down(ctx, h.cfg))
	})}
	left, err := h.Left()
	errs = append(errs, err)
	for _, l := range left {
		errs = append(errs, fmt.Errorf("left behind on the host: %s", l))
	}
	if _, err := os.Lstat(h.cfg.NetworkDir()); err == nil {
		errs = append(errs, fmt.Errorf("left behind: directory %s", h.cfg.NetworkDir()))
	}
	return errors.Join(append(errs, h.Host.Close())...)
}
