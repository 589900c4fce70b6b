package keeper

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/process"
)

func TestServesWithoutPrivileges(t *testing.T) {
	w := newWorld(t)
	k := w.start(t, exe)
	w.get(t, "http")
	w.get(t, "https")
	if err := k.Probe(w.ctx); err != nil {
		t.Error(err)
	}
	pid := strconv.Itoa(k.current.status.PID)
	tasks, err := os.ReadDir("/proc/" + pid + "/task")
	if err != nil {
		t.Fatal(err)
	}
	uid := fmt.Sprint(w.cfg.ProxyUID())
	for _, task := range tasks {
		b, err := os.ReadFile("/proc/" + pid + "/task/" + task.Name() + "/status")
		if err != nil {
			continue // the thread has ended
		}
		got := map[string]string{}
		for line := range strings.Lines(string(b)) {
			name, value, _ := strings.Cut(line, ":")
			got[name] = strings.Join(strings.Fields(value), " ")
		}
		const none = "0000000000000000"
		for name, want := range map[string]string{
			"Uid": strings.Repeat(uid+" ", 3) + uid, "Gid": strings.Repeat(uid+" ", 3) + uid, "Groups": "", "NoNewPrivs": "1",
			"CapInh": none, "CapPrm": none, "CapEff": none, "CapBnd": none, "CapAmb": none,
		} {
			if got[name] != want {
				t.Errorf("thread %s: %s is %q, want %q", task.Name(), name, got[name], want)
			}
		}
	}
	if root, err := os.Readlink("/proc/" + pid + "/root"); err != nil || root != w.cfg.IngressDir() {
		t.Errorf("its root is %s, %v", root, err)
	}
	for { // a request is counted after its client has got the answer
		m := gathered(t, k)
		if strings.Contains(m, `cube_ingress_requests_total{class="2xx"} 2`) && strings.Contains(m, "cube_ingress_open_streams 0") && strings.Contains(m, "cube_ingress_up 1") {
			break
		}
		if w.ctx.Err() != nil {
			t.Fatal(m)
		}
	}
}

// gathered are a keeper's metrics as text.
func gathered(t *testing.T, k *Keeper) string {
	t.Helper()
	families, err := prometheus.Gatherers{prometheus.NewRegistry(), k}.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&b, f); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

// TestUpgrade puts another version in place while requests come and streams go on: none of them notices.
func TestUpgrade(t *testing.T) {
	w := newWorld(t)
	first := w.start(t, exe)
	same := w.start(t, exe)
	if same.current.status.PID != first.current.status.PID {
		t.Error("a proxy that is as it should be is replaced")
	}
	ws := w.upgrade(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var n atomic.Int64
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				resp, err := w.client().Get("http://" + w.host + "/")
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				n.Add(1)
			}
		})
	}
	var second *Keeper
	for _, e := range []string{other, exe, other} {
		ws.echo(t)
		second = w.start(t, e)
		ws.echo(t)
	}
	close(stop)
	wg.Wait()
	t.Logf("%d requests meanwhile", n.Load())
	if second.current.status.PID == first.current.status.PID {
		t.Fatal("the version before still serves")
	}
	// The first one is there for its stream, and cuts it when it has to, and then ends.
	over, err := first.current.client.Life(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	st, err := first.current.client.Status(w.ctx)
	if err != nil || !st.Draining || st.Streams != 1 {
		t.Errorf("%+v, %v", st, err)
	}
	close(w.routes.gone)
	if b, err := io.ReadAll(ws.br); len(b) > 0 || err != nil && !strings.Contains(err.Error(), "reset") {
		t.Errorf("%q, %v", b, err)
	}
	select {
	case <-over:
	case <-w.ctx.Done():
		t.Error("the first one doesn't end with its last stream")
	}
}

// TestOutlives has the control plane end and begin anew: requests and streams go on.
func TestOutlives(t *testing.T) {
	w := newWorld(t)
	stop := w.serveRoutes(t)
	k := w.start(t, exe)
	w.get(t, "http")
	ws := w.upgrade(t)
	pid := k.current.status.PID
	for range 3 {
		stop()
		if err := k.Close(); err != nil {
			t.Error(err)
		}
		ws.echo(t)
		w.get(t, "https")
		stop = w.serveRoutes(t)
		k = w.start(t, exe)
		ws.echo(t)
	}
	if k.current.status.PID != pid {
		t.Error("the proxy was replaced")
	}
}

// TestKilled has the proxy killed: clients wait a moment, and are served by the next one.
func TestKilled(t *testing.T) {
	w := newWorld(t)
	k := w.start(t, exe)
	ctx, cancel := context.WithCancel(w.ctx)
	ran := make(chan error, 1)
	go func() { ran <- k.Run(ctx) }()
	for range 2 {
		all, err := instances(w.ctx, w.cfg)
		if err != nil || len(all) != 1 {
			t.Fatal(all, err)
		}
		over, err := all[0].client.Life(w.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(all[0].status.PID, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		<-over
		w.get(t, "http")
	}
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
}

// TestHung has the proxy hang: the next keeper, or a stop, doesn't wait for it for ever, and clients that do are served by its successor.
func TestHung(t *testing.T) {
	t.Setenv("CUBE_TIMEOUT_SCALE", "0.1")
	w := newWorld(t)
	w.cfg.TimeoutScale = 0.1
	hang := func(k *Keeper) process.ID {
		t.Helper()
		p, err := process.Of(k.current.status.PID)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(p.PID, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		if err := k.Close(); err != nil {
			t.Error(err)
		}
		if err := k.Probe(w.ctx); err == nil || !strings.Contains(err.Error(), "doesn't answer") {
			t.Errorf("one that hangs: %v", err)
		}
		return p
	}
	first := w.start(t, exe)
	w.get(t, "http")
	hung := hang(first)
	waiting, err := net.Dial("tcp", w.cfg.Proxy.Listen.String())
	if err != nil {
		t.Fatal(err)
	}
	defer waiting.Close()
	_ = waiting.SetDeadline(time.Now().Add(30 * time.Second))
	fmt.Fprintf(waiting, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", w.host)
	second := w.start(t, exe)
	if resp, err := http.ReadResponse(bufio.NewReader(waiting), nil); err != nil || resp.StatusCode != 200 {
		t.Errorf("who has waited meanwhile: %v, %v", resp, err)
	}
	w.get(t, "https")
	if hung.Alive() {
		t.Error("it still hangs")
	}
	hung = hang(second)
	if err := Stop(w.ctx, w.cfg); err != nil {
		t.Error(err)
	}
	if hung.Alive() {
		t.Error("it still hangs after a stop")
	}
}

func TestAnotherPort(t *testing.T) {
	w := newWorld(t)
	k := w.start(t, exe)
	w.get(t, "http")
	if err := k.Close(); err != nil { // a configuration is of one keeper's life
		t.Error(err)
	}
	before := w.cfg.Proxy.Listen
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.cfg.Proxy.Listen = netip.MustParseAddrPort(taken.Addr().String())
	if _, err := Start(w.ctx, w.cfg, exe, quiet); err == nil || !strings.Contains(err.Error(), "is taken") {
		t.Error(err)
	}
	taken.Close()
	w.start(t, exe)
	w.get(t, "http")
	w.cfg.Proxy.Listen = before
	if _, err := w.client().Get("http://" + w.host + "/"); err == nil {
		t.Error("the port before is still open")
	}
}

func TestBrokenProgram(t *testing.T) {
	w := newWorld(t)
	if _, err := Start(w.ctx, w.cfg, "/bin/false", quiet); err == nil || !strings.Contains(err.Error(), w.cfg.ProxyLog()) {
		t.Error(err)
	}
}

// TestTerminated has the proxy end by SIGTERM: what can be finished is, what goes on longer is cut.
func TestTerminated(t *testing.T) {
	t.Setenv("CUBE_TIMEOUT_SCALE", "0.1")
	w := newWorld(t)
	w.cfg.TimeoutScale = 0.1
	k := w.start(t, exe)
	ws := w.upgrade(t)
	ws.echo(t)
	over, err := k.current.client.Life(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(k.current.status.PID, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for { // it has a moment
		st, err := k.current.client.Status(w.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if st.Draining {
			break
		}
	}
	ws.echo(t)
	if b, err := io.ReadAll(ws.br); len(b) > 0 || err != nil && !strings.Contains(err.Error(), "reset") {
		t.Errorf("%q, %v", b, err)
	}
	select {
	case <-over:
	case <-w.ctx.Done():
		t.Error("it doesn't end")
	}
}
