package proxy

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/ingress"
	"github.com/cubesandbox/cube/orchestrator/ingress/target"
)

const (
	domain  = "sandbox.localhost"
	id      = "i0123456789abcdefghij"
	timeout = 10 * time.Second
)

// control is a control plane without sandboxes: a test says what there is.
type control struct {
	mu       sync.Mutex
	seq      uint64
	there    map[string]ingress.Route
	watchers map[chan ingress.Update]bool
	lookups  int
	// wake, if set, is what happens; muted keeps changes from watchers.
	wake  func(ctx context.Context, id string) (ingress.Route, error)
	muted bool
}

func newControl() *control {
	return &control{there: map[string]ingress.Route{}, watchers: map[chan ingress.Update]bool{}}
}

func (c *control) tellLocked(u ingress.Update) {
	if c.muted {
		return
	}
	for w := range c.watchers {
		w <- u
	}
}

func (c *control) put(r ingress.Route) ingress.Route {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	r.Seq = c.seq
	c.there[r.SandboxID] = r
	c.tellLocked(ingress.Update{Routes: []ingress.Route{r}})
	return r
}

func (c *control) remove(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.there, id)
	c.tellLocked(ingress.Update{Gone: []string{id}})
}

func (c *control) Lookup(_ context.Context, id string) (ingress.Route, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lookups++
	r, ok := c.there[id]
	if !ok {
		return r, errdefs.ErrNotFound
	}
	return r, nil
}

func (c *control) Wake(ctx context.Context, id string) (ingress.Route, error) { return c.wake(ctx, id) }

func (c *control) Watch(ctx context.Context, each func(ingress.Update) error) error {
	c.mu.Lock()
	w := make(chan ingress.Update, 1000)
	full := ingress.Update{Full: true}
	for _, r := range c.there {
		full.Routes = append(full.Routes, r)
	}
	w <- full
	c.watchers[w] = true
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.watchers, w)
		c.mu.Unlock()
	}()
	for {
		select {
		case u := <-w:
			if err := each(u); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// world is a proxy that serves, before one sandbox.
type world struct {
	*control
	proxy  *Proxy
	server *httptest.Server
	port   string // of the sandbox's server
	route  ingress.Route
}

// newWorld has a proxy serve for a sandbox whose server is handler.
func newWorld(t *testing.T, handler http.Handler) *world {
	t.Helper()
	backend := httptest.NewUnstartedServer(handler)
	backend.Config.Protocols = protocols()
	backend.Start()
	t.Cleanup(backend.Close)
	c := newControl()
	w := worldOf(t, c, c, backend.Listener.Addr())
	w.route = c.put(w.route)
	return w
}

func worldOf(t *testing.T, c *control, routes ingress.Routes, backend net.Addr) *world {
	t.Helper()
	at := netip.MustParseAddrPort(backend.String())
	w := &world{
		control: c, port: strconv.Itoa(int(at.Port())),
		route: ingress.Route{SandboxID: id, State: ingress.StateRunning, Addr: at.Addr(), Epoch: "e1", AllowPublic: true},
	}
	w.proxy = New(Options{Domain: domain, Routes: routes, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Scale: func(d time.Duration) time.Duration { return d }})
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan struct{})
	go func() { w.proxy.Run(ctx); close(ran) }()
	w.server = httptest.NewUnstartedServer(w.proxy)
	w.server.Config.Protocols = protocols()
	w.server.Start()
	t.Cleanup(func() {
		cancel()
		<-ran
		w.server.Close()
	})
	return w
}

func protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

// host is the sandbox's for its server's port.
func (w *world) host() string { return w.port + "-" + id + "." + domain }

func (w *world) request(t *testing.T, method, path string, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, w.server.URL+path, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = w.host()
	return r
}

func do(t *testing.T, r *http.Request) (*http.Response, string) {
	t.Helper()
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: timeout}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

func (w *world) get(t *testing.T, path string, header ...string) (*http.Response, string) {
	t.Helper()
	r := w.request(t, http.MethodGet, path, nil)
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			r.Host = header[i+1]
			continue
		}
		r.Header.Add(header[i], header[i+1])
	}
	return do(t, r)
}

// raw is a connection to the proxy for what http.Client wouldn't send.
func (w *world) raw(t *testing.T, text string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", w.server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	return c
}

// headers by which the sandbox is asked for where the host isn't its own.
func byHeader(port string) []string { return []string{target.HeaderID, id, target.HeaderPort, port} }

// eventually waits for what nobody tells of.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(timeout); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}
