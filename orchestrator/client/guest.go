package client

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
	"github.com/cubesandbox/cube/orchestrator/ingress"
	"github.com/cubesandbox/cube/orchestrator/ingress/target"
)

const (
	tokenHeader = "X-Access-Token"
	// pingEvery is how long a stream of envd's may be silent, for the proxies on its way, in seconds.
	pingEvery = "30"
)

// Guest is a way into a sandbox, by the proxy.
type Guest struct {
	ID string

	c     *Client
	token string
	// base is the URL of a port.
	base func(port uint16) *url.URL
}

// Enter asks the API for the way into a sandbox that runs, or that a request would wake.
func (c *Client) Enter(ctx context.Context, id string) (*Guest, error) {
	if err := CheckID(id); err != nil {
		return nil, err
	}
	var d detail
	if _, err := c.get(ctx, "/sandboxes/"+id, nil, &d); err != nil {
		return nil, err
	}
	d.ID = id
	if d.State != "running" && (!d.Lifecycle.AutoResume || c.proxy == nil) {
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("sandbox %s is %s: resume it first, with E2B's SDK or `e2b sandbox resume`", id, d.State))
	}
	return c.guest(d)
}

// guest is the way into a sandbox of which the API has told.
func (c *Client) guest(d detail) (*Guest, error) {
	g := &Guest{ID: d.ID, c: c, token: d.EnvdToken}
	if c.proxy != nil {
		g.base = func(uint16) *url.URL { return c.proxy }
		return g, nil
	}
	if d.Domain == "" {
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("the API doesn't tell by which domain sandboxes are reached: set %s", EnvSandbox))
	}
	if u, err := url.Parse("https://x." + d.Domain); err != nil || u.Host != "x."+d.Domain {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("the API's domain %q isn't one", d.Domain))
	}
	g.base = func(port uint16) *url.URL {
		return &url.URL{Scheme: "https", Host: fmt.Sprintf("%d-%s.%s", port, d.ID, d.Domain)}
	}
	return g, nil
}

// address completes a request for a port.
func (g *Guest) address(h http.Header, port uint16) {
	if g.c.proxy != nil {
		h.Set(target.HeaderID, g.ID)
		h.Set(target.HeaderPort, strconv.Itoa(int(port)))
	}
	if g.token != "" {
		h.Set(tokenHeader, g.token)
	}
}

// Processes is envd's service of processes, as a user of the sandbox's; "" is its default one.
func (g *Guest) Processes(user string) process.ProcessClient {
	// What is compressed costs the sandbox more time than the network.
	return process.NewProcessClient(&envd{g, user}, g.base(ingress.EnvdPort).String(), connect.WithAcceptCompression("gzip", nil, nil))
}

// envd is the http.Client of envd's services.
type envd struct {
	*Guest
	user string
}

// Do is of connect.HTTPClient.
func (e *envd) Do(r *http.Request) (*http.Response, error) {
	e.address(r.Header, ingress.EnvdPort)
	r.Header.Set("Keepalive-Ping-Interval", pingEvery)
	if e.user != "" {
		r.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(e.user+":")))
	}
	return e.c.http.Do(r)
}

// Answers returns when envd has answered.
func (g *Guest) Answers(ctx context.Context) error {
	at := g.base(ingress.EnvdPort)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String()+"/health", nil)
	if err != nil {
		return err
	}
	g.address(req.Header, ingress.EnvdPort)
	resp, err := g.c.http.Do(req)
	if err != nil {
		return unreachable(ctx, "the proxy", at, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return refusal("the proxy", resp)
	}
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, errorLimit))
	return err
}

// Exec has envd run a command line of the default user's shell to its end, and returns its exit code, -1 where a signal has ended it.
func (g *Guest) Exec(ctx context.Context, line string) (code int, err error) {
	stdin := false
	events, err := g.Processes("").Start(ctx, connect.NewRequest(&process.StartRequest{
		Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", line}}, Stdin: &stdin,
	}))
	if err != nil {
		return 0, g.Explain(err)
	}
	defer events.Close()
	for events.Receive() {
		if end := events.Msg().GetEvent().GetEnd(); end != nil {
			return int(end.GetExitCode()), nil
		}
	}
	if err := events.Err(); err != nil {
		return 0, g.Explain(err)
	}
	return 0, errdefs.ErrUnavailable.WithMessage("the command has no end: envd has gone")
}

// Explain makes an error of envd's services, or of the way to them, one for the user.
func (g *Guest) Explain(err error) error {
	if err == nil {
		return nil
	}
	e, ok := err.(*connect.Error)
	if !ok {
		return err
	}
	if !connect.IsWireError(err) {
		return unreachable(context.Background(), "the proxy", g.base(ingress.EnvdPort), e.Unwrap())
	}
	return classed(codes[e.Code()], "sandbox "+g.ID, e.Message())
}

// codes are the statuses of the errors that envd tells.
var codes = map[connect.Code]int{
	connect.CodeInvalidArgument: http.StatusBadRequest, connect.CodeUnauthenticated: http.StatusUnauthorized, connect.CodeNotFound: http.StatusNotFound,
	connect.CodeFailedPrecondition: http.StatusPreconditionFailed, connect.CodeUnavailable: http.StatusServiceUnavailable, connect.CodePermissionDenied: http.StatusForbidden,
	connect.CodeResourceExhausted: http.StatusTooManyRequests, connect.CodeUnimplemented: http.StatusNotImplemented, connect.CodeInternal: http.StatusInternalServerError,
}

// Dial connects to a port of the sandbox.
func (g *Guest) Dial(ctx context.Context, port uint16) (Conn, error) {
	// The request's context is the connection's, too.
	life, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
	late := time.AfterFunc(g.c.o.Timeout(answerTimeout), func() { cancel(errdefs.ErrUnavailable.WithMessage("no answer in time")) })
	defer late.Stop()
	at := g.base(port)
	req, err := http.NewRequestWithContext(life, http.MethodGet, at.String()+"/", nil)
	if err != nil {
		cancel(nil)
		return nil, err
	}
	g.address(req.Header, port)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", ingress.TunnelProtocol)
	resp, err := g.c.upgrades.Do(req)
	if err != nil {
		defer cancel(nil)
		return nil, unreachable(life, "the proxy", at, err)
	}
	stream, ok := resp.Body.(io.ReadWriteCloser)
	if resp.StatusCode != http.StatusSwitchingProtocols || !ok || !strings.EqualFold(resp.Header.Get("Upgrade"), ingress.TunnelProtocol) {
		defer cancel(nil)
		defer resp.Body.Close()
		return nil, refusal("the proxy", resp)
	}
	return &conn{ReadWriteCloser: stream, cancel: cancel}, nil
}

// Conn is a connection to a port. CloseWrite ends what goes there.
type Conn interface {
	io.ReadWriteCloser
	CloseWrite() error
}

type conn struct {
	io.ReadWriteCloser
	cancel context.CancelCauseFunc
}

// CloseWrite is of Conn.
func (c *conn) CloseWrite() error {
	if half, ok := c.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return net.ErrClosed
}

// Close is of io.Closer.
func (c *conn) Close() error {
	defer c.cancel(nil)
	return c.ReadWriteCloser.Close()
}

// Join copies both ways between two connections until both have ended, and closes them.
func Join(a, b Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		pour(a, b)
	}()
	pour(b, a)
	<-done
	_ = a.Close()
	_ = b.Close()
}

// pour copies all of from, and hands its end on; after an error neither is of use.
func pour(to, from Conn) {
	if _, err := io.Copy(to, from); err == nil && to.CloseWrite() == nil {
		return
	}
	_ = to.Close()
	_ = from.Close()
}
