package proxy

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"

	"github.com/cubesandbox/cube/guest-agent/envd/auth"
	"github.com/cubesandbox/cube/orchestrator/ingress"
)

// tunnels says whether a request wants the bare port, and not what HTTP server may be there.
func tunnels(r *http.Request) bool {
	return strings.EqualFold(strings.TrimSpace(r.Header.Get("Upgrade")), ingress.TunnelProtocol)
}

// admitTunnel lets in who shows envd's token, and so could connect from inside of the sandbox as well. Other requests are checked
// one by one; of what goes through a tunnel nothing is.
func (p *pass) admitTunnel(r ingress.Route, _ bool) error {
	refuse := func(why string) error {
		return &refusal{SandboxID: p.to.SandboxID, Port: p.to.Port, Message: why, Code: http.StatusForbidden}
	}
	switch {
	case p.to.Port == ingress.EnvdPort:
		return refuse("There are no tunnels to envd's port, as some of its endpoints are the control plane's alone")
	case !r.Secure:
		return refuse("The sandbox isn't secure: it has no access token that could be shown for a tunnel")
	case p.req.Header.Get(auth.Header) == "":
		return refuse("A tunnel needs the sandbox's access token in the header 'X-Access-Token'")
	case r.EnvdToken == "" || !auth.Equal(p.req.Header.Get(auth.Header), r.EnvdToken):
		return refuse("The access token in the header 'X-Access-Token' is invalid")
	}
	return nil
}

// tunnel connects the client to the port until both sides have ended, or the sandbox's life has. An error is of before that.
func (p *Proxy) tunnel(v *visit, r *http.Request) error {
	if r.ProtoMajor != 1 || !strings.Contains(strings.ToLower(r.Header.Get("Connection")), "upgrade") || r.ContentLength != 0 {
		return &refusal{SandboxID: v.to.SandboxID, Message: "A tunnel is an HTTP/1.1 request without a body, with the header 'Connection: Upgrade'", Code: http.StatusBadRequest}
	}
	ctx, cancel := context.WithTimeout(r.Context(), p.table.scale(dialTimeout))
	inside, err := v.life.dial(ctx, v.route.Addr, netip.AddrPortFrom(v.route.Addr, v.to.Port).String())
	cancel()
	var de *dialError
	switch {
	case errors.As(err, &de):
		return p.unreachable(r.Context(), v, de)
	case err != nil:
		return notFound(v.to)
	}
	defer inside.Close()
	h := v.Header()
	h.Set("Connection", "Upgrade")
	h.Set("Upgrade", ingress.TunnelProtocol)
	v.WriteHeader(http.StatusSwitchingProtocols)
	v.begin(http.StatusSwitchingProtocols)
	outside, buf, err := v.rc.Hijack()
	if err != nil {
		p.log.Debug("a tunnel's connection can't be had", "sandbox", v.to.SandboxID, "error", err)
		return nil // the client has its answer
	}
	defer outside.Close()
	// A life that ends takes its side of the tunnel with it; the client's may be waiting for room or for bytes.
	defer context.AfterFunc(r.Context(), func() { outside.Close(); inside.Close() })()
	var up atomic.Int64
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		early, _ := buf.Reader.Peek(buf.Reader.Buffered())
		// Past the buffer, since what the server reads for it ends the request's context when the client has said all.
		n, err := io.Copy(inside, io.MultiReader(bytes.NewReader(early), outside))
		up.Store(n)
		halve(inside, outside, err)
	}()
	down, err := io.Copy(outside, inside)
	halve(outside, inside, err)
	<-sent
	v.bytes = down
	p.log.Debug("a tunnel has ended", "sandbox", v.to.SandboxID, "port", v.to.Port, "up", up.Load(), "down", down)
	return nil
}

// halve hands the end of what from has sent on to its other side. After an error neither is of use.
func halve(to, from net.Conn, err error) {
	if half, ok := to.(interface{ CloseWrite() error }); ok && err == nil && half.CloseWrite() == nil {
		return
	}
	_ = to.Close()
	_ = from.Close()
}
