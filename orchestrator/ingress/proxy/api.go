package proxy

import (
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"time"
)

// apiIdle is how long a connection to the API is kept without a request.
const apiIdle = time.Minute

// newAPI takes requests to the API: clients that know only the domain ask at a host below it, like for sandboxes. It asks for keys
// itself.
func (p *Proxy) newAPI(at netip.AddrPort) *httputil.ReverseProxy {
	if at.Addr().IsUnspecified() {
		at = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), at.Port())
	}
	return &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.Out.URL.Scheme, pr.Out.URL.Host, pr.Out.URL.User = "http", at.String(), nil
			pr.Out.URL.RawQuery = pr.In.URL.RawQuery
			pr.Out.Header.Del("Upgrade") // it has nothing that could be
			pr.Out.Header.Del("Connection")
			pr.SetXForwarded()
		},
		Transport: &http.Transport{DisableCompression: true, IdleConnTimeout: apiIdle, MaxIdleConnsPerHost: maxIdle},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			p.log.Debug("the API can't be reached", "error", err)
			p.refuse(w.(*visit), r, &refusal{Message: "The API doesn't answer: the control plane is being started or is away", Code: http.StatusServiceUnavailable, retry: true})
		},
		ErrorLog:   log.New(io.Discard, "", 0),
		BufferPool: &buffers{},
	}
}
