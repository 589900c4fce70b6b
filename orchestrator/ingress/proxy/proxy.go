// Package proxy takes requests from outside into sandboxes: HTTP of all versions, streams and upgraded connections, each to a
// port of a sandbox and to nothing else. It keeps what is open while the control plane is away, and cuts it when the machine at its
// end is another one. It trusts neither side.
package proxy

import (
	"context"
	"errors"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/ingress"
	"github.com/cubesandbox/cube/orchestrator/ingress/target"
)

// portPlaceholder stands for the port in Route.MaskHost.
const portPlaceholder = "${PORT}"

// Options are what a Proxy needs to know.
type Options struct {
	// Domain is that below which sandboxes' host names are, in lower case.
	Domain string
	// API is where the control plane's REST API listens, which is at api.<Domain> for clients; the zero value is nowhere.
	API    netip.AddrPort
	Routes ingress.Routes
	Log    *slog.Logger
	// Scale adapts deadlines to the host.
	Scale func(time.Duration) time.Duration
}

// Proxy is the http.Handler.
type Proxy struct {
	domain  string
	table   *table
	log     *slog.Logger
	reverse *httputil.ReverseProxy
	api     *httputil.ReverseProxy
	open    sync.WaitGroup
	count   atomic.Int64 // of what open waits for
}

// New makes a proxy. Run keeps it up to date.
func New(o Options) *Proxy {
	p := &Proxy{domain: o.Domain, log: o.Log, table: newTable(o.Routes, o.Log, o.Scale)}
	p.reverse = &httputil.ReverseProxy{
		Rewrite:        rewrite,
		Transport:      transport{},
		FlushInterval:  -1,
		ModifyResponse: noteAnswer,
		ErrorHandler:   p.failed,
		ErrorLog:       log.New(io.Discard, "", 0), // what it tells is in the access log
		BufferPool:     &buffers{},
	}
	p.api = p.newAPI(o.API)
	return p
}

// Run follows the control plane until ctx ends, and then ends all that is open.
func (p *Proxy) Run(ctx context.Context) {
	p.table.watch(ctx)
	p.table.close()
}

// Streams is how many requests and upgraded connections are open.
func (p *Proxy) Streams() int { return int(p.count.Load()) }

// Wait returns when none are open, or ctx ends. No request must begin meanwhile.
func (p *Proxy) Wait(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		p.open.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// visit is what is known of a request under way.
type visit struct {
	*stream
	to      target.Target
	route   ingress.Route
	body    *body
	refused bool
	again   bool // no answer was given: the request begins anew
}

// errAgain says that nothing has come of a request, and nothing but another attempt is to be made of it.
var errAgain = errors.New("the sandbox's machine is another one")

type visitKey struct{}

func visitOf(ctx context.Context) *visit { return ctx.Value(visitKey{}).(*visit) }

// ServeHTTP is of http.Handler.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	s, r := newStream(w, r)
	v := &visit{stream: s}
	p.open.Add(1)
	p.count.Add(1)
	openStreams.Inc()
	defer func() {
		s.finish()
		openStreams.Dec()
		p.count.Add(-1)
		defer p.open.Done()
		c := class(s.status)
		if v.refused {
			c = "refused"
		}
		requests.WithLabelValues(c).Inc()
		// No query: it may hold a signature.
		p.log.Info("request", "sandbox", v.to.SandboxID, "port", v.to.Port, "client", r.RemoteAddr, "method", r.Method, "host", r.Host, "path", r.URL.Path,
			"proto", r.Proto, "status", s.status, "refused", v.refused, "cut", s.wasCut(), "bytes", s.bytes, "took", time.Since(began).Round(time.Millisecond))
	}()
	if err := p.forward(v, r); err != nil {
		p.refuse(v, r, err)
	}
}

// forward hands a request to its sandbox. An error is of before that.
func (p *Proxy) forward(v *visit, r *http.Request) (err error) {
	if r.Method == http.MethodConnect || r.URL.Opaque != "" {
		return &refusal{Message: "This proxy takes requests for sandboxes only", Code: http.StatusBadRequest}
	}
	if target.API(r.Host, p.domain) {
		p.api.ServeHTTP(v, r)
		return nil
	}
	if v.to, err = target.Of(r.Host, r.Header, p.domain); err != nil {
		return err
	}
	if v.to.Reserved(r.URL.Path) {
		return &refusal{SandboxID: v.to.SandboxID, Message: "The endpoint is reserved for the E2B control plane", Code: http.StatusNotFound}
	}
	pass := &pass{to: v.to, traffic: r.Header.Get(target.HeaderToken), req: r}
	admit, forward := pass.admit, p.request
	if tunnels(r) {
		admit, forward = pass.admitTunnel, p.tunnel
	}
	for range maxTurns {
		if v.route, err = p.table.enter(r.Context(), v.to.SandboxID, v.stream, admit); err != nil {
			return err
		}
		if err = forward(v, r); !errors.Is(err, errAgain) {
			return err
		}
		v.leave()
	}
	return errRestless
}

// request hands on one request, with its answer or what it is upgraded to.
func (p *Proxy) request(v *visit, r *http.Request) error {
	v.again, v.body = false, &body{ReadCloser: r.Body}
	ctx := v.begins(r.Context(), v.route.AutoResume, reads(r))
	p.reverse.ServeHTTP(v, r.WithContext(context.WithValue(ctx, visitKey{}, v)))
	if v.again {
		return errAgain
	}
	_ = r.Body.Close() // whoever still reads it is to stop
	return nil
}

// reads says whether a request changes nothing and has all it is in its header.
func reads(r *http.Request) bool {
	return r.ContentLength == 0 && (r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodOptions)
}

// rewrite makes the request that the sandbox gets.
func rewrite(pr *httputil.ProxyRequest) {
	v := visitOf(pr.In.Context())
	out := pr.Out
	out.URL.Scheme = "http"
	if v.route.HTTPS(v.to.Port) {
		out.URL.Scheme = "https"
	}
	out.URL.Host = netip.AddrPortFrom(v.route.Addr, v.to.Port).String()
	out.URL.User = nil                    // of a request line with a whole URL: it would become a header
	out.URL.RawQuery = pr.In.URL.RawQuery // as it came, however odd
	out.Trailer = pr.In.Trailer           // filled in when the body has been read
	out.Host = pr.In.Host
	if v.route.MaskHost != "" {
		out.Host = strings.ReplaceAll(v.route.MaskHost, portPlaceholder, strconv.Itoa(int(v.to.Port)))
	}
	if out.Body != nil {
		out.Body = v.body
	}
	// They are between the client and this proxy. The token is for all ports, whoever listens there.
	for _, name := range []string{target.HeaderID, target.HeaderPort, target.HeaderToken} {
		out.Header.Del(name)
	}
	// Nothing is upgraded that could carry further requests past the checks above: not to HTTP/2, and nothing of envd's.
	if upgrade := out.Header.Get("Upgrade"); upgrade != "" && (v.to.Port == ingress.EnvdPort || strings.HasPrefix(strings.ToLower(upgrade), "h2")) {
		out.Header.Del("Upgrade")
		out.Header.Del("Connection")
	}
	out.Header.Del("Http2-Settings")
	pr.SetXForwarded()
}

// transport sends each request by the connections of its life: as HTTP/2 what only works so, if the client speaks it, too.
type transport struct{}

func (transport) RoundTrip(r *http.Request) (*http.Response, error) {
	v := visitOf(r.Context())
	if v.speaksHTTP2(r) {
		return v.life.http2.RoundTrip(r)
	}
	return v.life.http1.RoundTrip(r)
}

// speaksHTTP2 says whether the sandbox's server is to be spoken to in HTTP/2: for gRPC, and for clients that speak it without
// having asked, and so know their server.
func (v *visit) speaksHTTP2(r *http.Request) bool {
	return r.ProtoMajor == 2 && (r.TLS == nil || strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc"))
}

// noteAnswer notes what the visit's writer can't see of an answer: that there will be no body, and a status that the client gets
// past it.
func noteAnswer(resp *http.Response) error {
	v := visitOf(resp.Request.Context())
	if v.lost() {
		return errOver
	}
	v.empty = resp.ContentLength == 0 && len(resp.Trailer) == 0
	if resp.StatusCode == http.StatusSwitchingProtocols {
		v.begin(resp.StatusCode)
	}
	return nil
}

// failed answers a request for which there is no answer of the sandbox's.
func (p *Proxy) failed(_ http.ResponseWriter, r *http.Request, err error) {
	v := visitOf(r.Context())
	var de *dialError
	switch {
	case v.lost():
		v.again = true
		return
	case v.wasCut():
		err = notFound(v.to)
	case v.body.broke.Load():
		err = &refusal{SandboxID: v.to.SandboxID, Message: "The request's body is malformed or broke off", Code: http.StatusBadRequest}
	case errors.As(err, &de):
		if err = p.unreachable(r.Context(), v, de); errors.Is(err, errAgain) || v.lost() {
			v.again = true
			return
		}
	case r.Context().Err() == nil:
		err = badAnswer(v.to)
	}
	p.refuse(v, r, err)
}

// unreachable tells a closed port from a sandbox that isn't there any more, of which this proxy hasn't heard yet. Where another
// machine has taken its place, or would if the sandbox were woken, it is errAgain.
func (p *Proxy) unreachable(ctx context.Context, v *visit, de *dialError) error {
	if !de.refused() {
		p.table.doubt(v.to.SandboxID, v.life)
	}
	r, err := p.table.ask(ctx, v.to.SandboxID, p.table.lookups, p.table.lookup)
	switch {
	case errdefs.IsNotFound(err):
		return notFound(v.to)
	case err == nil && (r.Open() && r.Epoch != v.route.Epoch || !r.Open() && (r.AutoResume || r.State == ingress.StateRewinding)):
		return errAgain
	case err == nil && !r.Open():
		return notFound(v.to)
	}
	return portClosed(v.to)
}

// refuse answers in the sandbox's place.
func (p *Proxy) refuse(v *visit, r *http.Request, err error) {
	if r.Context().Err() != nil && !v.wasCut() {
		return // there is nobody to tell
	}
	if v.wasCut() {
		err = notFound(v.to)
		if r.ProtoMajor == 1 {
			v.Header().Set("Connection", "close") // its deadlines are over
		}
	}
	ref := refusalOf(v.to, err)
	if ref.Code >= 500 || ref.Code == http.StatusConflict {
		p.log.Debug("refused", "sandbox", v.to.SandboxID, "port", v.to.Port, "error", err)
	}
	v.refused = true
	ref.write(v, r)
}

// body is a request's, which knows whether it was the client that broke off.
type body struct {
	io.ReadCloser
	broke atomic.Bool
}

// Close leaves the client's body open for another attempt. What has read it for this one has stopped: attempts that have got as far
// as a body aren't repeated.
func (b *body) Close() error { return nil }

// Read is of io.Reader.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF && !errors.Is(err, http.ErrBodyReadAfterClose) {
		b.broke.Store(true)
	}
	return n, err
}

// buffers are for copying.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, copyBuffer)
}

func (b *buffers) Put(p []byte) { b.pool.Put(&p) }
