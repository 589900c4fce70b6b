package guests

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/cubesandbox/cube/guest-agent/envd"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// TestLine: the real envd takes what it is told on a line, also long after it was opened, and who has its address after it hears
// nothing of that.
func TestLine(t *testing.T) {
	addr := netip.MustParseAddr("127.91.3.8") // whose port is nobody else's
	at := netip.AddrPortFrom(addr, Port).String()
	g, ctx := New(func(d time.Duration) time.Duration { return d }), t.Context()
	life, end := context.WithCancel(ctx)
	defer end()
	ended := make(chan error, 1)
	go func() { ended <- envd.Run(life, envd.Config{Address: at, User: "root"}) }()
	must(t, g.Init(ctx, addr, lifecycle.Init{SandboxID: "i1"}))
	lines := make([]lifecycle.Line, 3)
	for i := range lines {
		var err error
		lines[i], err = g.Line(ctx, addr)
		must(t, err)
		defer lines[i].Close()
	}
	must(t, lines[0].Init(ctx, lifecycle.Init{SandboxID: "i1", Token: "secret", Env: map[string]string{"GREETING": "hello"}}))
	if out, err := g.Run(ctx, addr, "secret", "echo $GREETING"); err != nil || out != "hello\n" {
		t.Errorf("its processes say %q, %v", out, err)
	}
	if err := lines[0].Init(ctx, lifecycle.Init{Token: "other"}); err == nil {
		t.Error("it was told with a token that it doesn't have")
	}
	lines[1].(*kept).silent = time.Now().Add(-maxSilence - time.Second)
	if err := lines[1].Init(ctx, lifecycle.Init{Token: "secret"}); err == nil {
		t.Error("a line of long ago is of use")
	}
	end()
	must(t, <-ended)
	l, err := net.Listen("tcp", at)
	must(t, err)
	heard := make(chan string, 1)
	next := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { heard <- r.URL.Path })}
	defer next.Close()
	go func() { _ = next.Serve(l) }()
	if err := lines[2].Init(ctx, lifecycle.Init{Token: "secret"}); err == nil {
		t.Error("what has ended was told")
	}
	select {
	case path := <-heard:
		t.Errorf("another was told %s", path)
	case <-time.After(100 * time.Millisecond):
	}
}
