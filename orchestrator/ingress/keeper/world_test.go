package keeper

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/ca"
	"github.com/cubesandbox/cube/orchestrator/ingress"
)

const id = "i0123456789abcdefghij"

// exe is cube, as it is built for hosts; other is the same program with other bytes.
var exe, other string

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "cube-keeper-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	exe, other = filepath.Join(dir, "cube"), filepath.Join(dir, "cube2")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", exe, "github.com/cubesandbox/cube/cmd/cube")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "%v: %s\n", err, out)
		return 1
	}
	b, err := os.ReadFile(exe)
	if err == nil {
		err = os.WriteFile(other, append(b, 0), 0o755)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// routes are one sandbox's.
type routes struct {
	route ingress.Route
	gone  chan struct{}
}

func (r *routes) Lookup(_ context.Context, id string) (ingress.Route, error) {
	if id == r.route.SandboxID {
		return r.route, nil
	}
	return ingress.Route{}, errdefs.ErrNotFound
}

func (r *routes) Wake(ctx context.Context, id string) (ingress.Route, error) {
	return r.Lookup(ctx, id)
}

func (r *routes) Watch(ctx context.Context, each func(ingress.Update) error) error {
	if err := each(ingress.Update{Full: true, Routes: []ingress.Route{r.route}}); err != nil {
		return err
	}
	select {
	case <-r.gone:
		if err := each(ingress.Update{Gone: []string{r.route.SandboxID}}); err != nil {
			return err
		}
		<-ctx.Done()
	case <-ctx.Done():
	}
	return ctx.Err()
}

// world is a configuration, a control plane and a sandbox that echoes lines and answers with its name.
type world struct {
	cfg    *config.Config
	ctx    context.Context
	routes *routes
	host   string
	roots  *x509.CertPool
}

func newWorld(t *testing.T) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the proxy's privileges are root's to give up")
	}
	cfg := config.Default()
	cfg.StateDir = t.TempDir()
	run, err := os.MkdirTemp("", "cube-keeper-")
	if err != nil {
		t.Fatal(err)
	}
	cfg.RunDir = run
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg.Proxy.Listen = netip.MustParseAddrPort(l.Addr().String())
	l.Close()
	file := filepath.Join(cfg.StateDir, "config.toml")
	text := fmt.Sprintf("state_dir = %q\nrun_dir = %q\n[proxy]\nlisten = %q\n", cfg.StateDir, cfg.RunDir, cfg.Proxy.Listen)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(config.FileEnv, file)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(func() {
		if err := Stop(ctx, cfg); err != nil {
			t.Error(err)
		}
		if all, err := instances(ctx, cfg); len(all) > 0 || err != nil {
			t.Errorf("proxies are left: %v, %v", all, err)
		}
		cancel()
		os.RemoveAll(run)
		if t.Failed() {
			b, _ := os.ReadFile(cfg.ProxyLog())
			for line := range strings.Lines(string(b)) {
				if !strings.Contains(line, "msg=request") {
					t.Log("proxy: ", line)
				}
			}
		}
	})
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
			io.WriteString(w, "hello")
			return
		}
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", "websocket")
		w.WriteHeader(http.StatusSwitchingProtocols)
		c, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		io.Copy(c, buf)
	}))
	t.Cleanup(backend.Close)
	at := netip.MustParseAddrPort(backend.Listener.Addr().String())
	w := &world{
		cfg: cfg, ctx: ctx, host: fmt.Sprintf("%d-%s.%s", at.Port(), id, cfg.Proxy.Name()), roots: x509.NewCertPool(),
		routes: &routes{route: ingress.Route{SandboxID: id, State: ingress.StateRunning, Addr: at.Addr(), Epoch: "e1", AllowPublic: true}, gone: make(chan struct{})},
	}
	w.serveRoutes(t)
	a, err := ca.Open(ctx, cfg.CADir(), cfg.Proxy.Name())
	if err != nil {
		t.Fatal(err)
	}
	w.roots.AppendCertsFromPEM(a.Root())
	return w
}

// serveRoutes is a control plane's part, which ends by stop.
func (w *world) serveRoutes(t *testing.T) (stop func()) {
	t.Helper()
	l, err := ListenRoutes(w.cfg)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: ingress.Handler(w.routes)}
	go srv.Serve(l)
	t.Cleanup(func() { srv.Close() })
	return func() { srv.Close() }
}

func (w *world) start(t *testing.T, exe string) *Keeper {
	t.Helper()
	k, err := Start(w.ctx, w.cfg, exe, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	return k
}

// client dials the proxy, whatever the URL's host.
func (w *world) client() *http.Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", w.cfg.Proxy.Listen.String())
	}
	return &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: w.roots}}}
}

func (w *world) get(t *testing.T, scheme string) {
	t.Helper()
	resp, err := w.client().Get(scheme + "://" + w.host + "/")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); string(b) != "hello" || err != nil {
		t.Fatalf("%s %q %v", resp.Status, b, err)
	}
}

// socket is an upgraded connection.
type socket struct {
	net.Conn
	br *bufio.Reader
}

func (w *world) upgrade(t *testing.T) *socket {
	t.Helper()
	c, err := net.Dial("tcp", w.cfg.Proxy.Listen.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", w.host)
	br := bufio.NewReader(c)
	if resp, err := http.ReadResponse(br, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(resp, err)
	}
	return &socket{c, br}
}

func (s *socket) echo(t *testing.T) {
	t.Helper()
	if _, err := io.WriteString(s, "x\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := s.br.ReadString('\n'); line != "x\n" || err != nil {
		t.Fatalf("%q, %v", line, err)
	}
}
