package proxy

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"time"

	"github.com/cubesandbox/cube/guest-agent/envd/auth"
	"github.com/cubesandbox/cube/orchestrator/ingress"
	"github.com/cubesandbox/cube/orchestrator/ingress/target"
)

// pass is what a request shows to be let through.
type pass struct {
	to      target.Target
	traffic string
	req     *http.Request
}

// admit says whether the request may go to a sandbox, or wake it. The error is a *refusal.
func (p *pass) admit(r ingress.Route, wake bool) error {
	if p.to.Port != ingress.EnvdPort {
		return p.admitPort(&r)
	}
	// envd asks for its tokens itself; only a sandbox that sleeps can't.
	if wake && r.Secure && !p.knowsEnvd(r.EnvdToken) {
		return &refusal{SandboxID: p.to.SandboxID, Message: "The sandbox is paused and is resumed only by a request with a valid access token", Code: http.StatusForbidden}
	}
	return nil
}

func (p *pass) admitPort(r *ingress.Route) error {
	if r.AllowPublic {
		return nil
	}
	sum := sha256.Sum256([]byte(p.traffic))
	const prefix = "Sandbox is secured with traffic access token. "
	switch {
	case p.traffic == "":
		return &refusal{SandboxID: p.to.SandboxID, Message: prefix + "Token header 'e2b-traffic-access-token' is missing", Code: http.StatusForbidden}
	case subtle.ConstantTimeCompare(sum[:], r.TrafficToken) != 1:
		return &refusal{SandboxID: p.to.SandboxID, Message: prefix + "Provided token in header 'e2b-traffic-access-token' is invalid", Code: http.StatusForbidden}
	}
	return nil
}

// knowsEnvd says whether a request shows what envd would let it pass for: the token, or a signature for a file.
func (p *pass) knowsEnvd(token string) bool {
	if token == "" {
		return false // there is nothing to compare with
	}
	if p.req.URL.Path != "/files" {
		return auth.Allowed(p.req, token)
	}
	operation := auth.Read
	if p.req.Method == http.MethodPost {
		operation = auth.Write
	}
	return auth.Files(p.req, p.req.URL.Query(), operation, token, time.Now()) == nil
}
