package daemon

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/control"
	"github.com/cubesandbox/cube/orchestrator/ingress/proxy"
)

// Paths of the keeper's socket.
const (
	pathStatus   = "/v1/status"
	pathListener = "/v1/listener"
	pathLife     = "/v1/life"
	pathDrain    = "/v1/drain"
	pathStop     = "/v1/stop"
	pathMetrics  = "/metrics"
)

// Status is how a proxy does.
type Status struct {
	// Identity is what its keeper has named it.
	Identity string `json:"identity"`
	PID      int    `json:"pid"`
	// Draining says that it takes nothing new.
	Draining bool `json:"draining"`
	Streams  int  `json:"streams"`
}

// handler answers the keeper, who alone can connect.
func (d *daemon) handler(life context.Context) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(proxy.Collectors()...)
	mux := http.NewServeMux()
	mux.Handle("GET "+pathMetrics, promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET "+pathStatus, func(w http.ResponseWriter, _ *http.Request) { control.Answer(w, d.status(), nil) })
	mux.HandleFunc("POST "+pathDrain, func(w http.ResponseWriter, _ *http.Request) {
		d.once.Do(func() { close(d.drain) })
		control.Answer(w, d.status(), nil)
	})
	mux.HandleFunc("POST "+pathStop, func(w http.ResponseWriter, _ *http.Request) {
		d.stopOnce.Do(func() { close(d.stop) })
		control.Answer(w, d.status(), nil)
	})
	mux.HandleFunc("GET "+pathLife, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		select { // its end is the answer
		case <-life.Done():
		case <-r.Context().Done():
		}
	})
	mux.HandleFunc("GET "+pathListener, d.giveListener)
	return mux
}

func (d *daemon) status() Status {
	s := Status{Identity: d.o.Identity, PID: os.Getpid(), Streams: d.proxy.Streams()}
	select {
	case <-d.drain:
		s.Draining = true
	default:
	}
	return s
}

// giveListener sends a descriptor of the port, with a byte that nobody needs. It is not os.File's Fd that tells the descriptor:
// that would have the port block whoever accepts from it, here and there.
func (d *daemon) giveListener(w http.ResponseWriter, _ *http.Request) {
	raw, err := d.listener.SyscallConn()
	if err != nil {
		control.Answer(w, nil, err)
		return
	}
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		control.Answer(w, nil, err)
		return
	}
	defer c.Close()
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return
	}
	var sent error
	err = raw.Control(func(fd uintptr) { _, _, sent = uc.WriteMsgUnix([]byte{1}, unix.UnixRights(int(fd)), nil) })
	if err = errors.Join(err, sent); err != nil {
		d.o.Log.Warn("the port can't be handed over", "error", err)
	}
}
