package proxy

import (
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/ingress/target"
)

// refusal is what a client gets that gets nothing of the sandbox's. Its JSON is E2B's.
type refusal struct {
	SandboxID string `json:"sandboxId,omitempty"`
	Message   string `json:"message"`
	Port      uint16 `json:"port,omitempty"`
	Code      int    `json:"code"`

	// retry has the client try again in a second.
	retry bool
}

func (r *refusal) Error() string { return r.Message }

func notFound(to target.Target) *refusal {
	return &refusal{SandboxID: to.SandboxID, Message: "The sandbox was not found", Code: http.StatusBadGateway}
}

func portClosed(to target.Target) *refusal {
	return &refusal{SandboxID: to.SandboxID, Message: "The sandbox is running but port is not open", Port: to.Port, Code: http.StatusBadGateway}
}

func badAnswer(to target.Target) *refusal {
	return &refusal{SandboxID: to.SandboxID, Message: "The sandbox's server broke off or gave no valid answer", Port: to.Port, Code: http.StatusBadGateway}
}

// refusalOf is what a client is told of an error on the way to its target. Of the control plane's errors it gets the class and not
// the words, which are for the operator.
func refusalOf(to target.Target, err error) *refusal {
	if r, ok := err.(*refusal); ok {
		return r
	}
	r := &refusal{SandboxID: to.SandboxID}
	switch {
	case errdefs.IsNotFound(err):
		return notFound(to)
	case errdefs.IsInvalidArgument(err):
		r.Code, r.Message = http.StatusBadRequest, err.Error()
	case errdefs.IsPermissionDenied(err):
		r.Code, r.Message = http.StatusForbidden, "The sandbox is paused and can't be resumed by a request"
	case errdefs.IsAlreadyExists(err), errdefs.IsConflict(err), errdefs.IsFailedPrecondition(err), errdefs.IsAborted(err):
		r.Code, r.Message = http.StatusConflict, "The sandbox is in a transition and can't be resumed now"
	case errdefs.IsResourceExhausted(err):
		r.Code, r.Message, r.retry = http.StatusTooManyRequests, "The sandbox is paused, and there is no room to resume it now", true
	default:
		r.Code, r.Message, r.retry = http.StatusServiceUnavailable, "The sandbox can't be reached now: the control plane doesn't answer, or can't resume it", true
	}
	return r
}

// write answers a request with the refusal: a page for a person, JSON for all others.
func (r *refusal) write(w http.ResponseWriter, req *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if r.retry {
		h.Set("Retry-After", "1")
	}
	var body []byte
	if isNavigation(req) {
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
		var b strings.Builder
		_ = page.Execute(&b, struct {
			*refusal
			Title string
		}{r, fmt.Sprintf("%d %s", r.Code, http.StatusText(r.Code))}) // it can't fail with these fields
		body = []byte(b.String())
	} else {
		h.Set("Content-Type", "application/json; charset=utf-8")
		body, _ = json.Marshal(r) // neither can it
		body = append(body, '\n')
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(r.Code)
	_, _ = w.Write(body) // the client may be gone
}

// isNavigation says whether a person's browser wants a page. Browsers that don't tell by Sec-Fetch-Mode ask for HTML by name.
func isNavigation(r *http.Request) bool {
	if mode := r.Header.Get("Sec-Fetch-Mode"); mode != "" {
		return mode == "navigate"
	}
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) && strings.Contains(r.Header.Get("Accept"), "text/html")
}

var page = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{{.Title}}</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:36em;margin:15vh auto;padding:0 1em}code{background:#8882;padding:.1em .3em}</style></head>
<body><h1>{{.Title}}</h1><p>{{.Message}}.</p>{{if .SandboxID}}<p>Sandbox <code>{{.SandboxID}}</code>{{if .Port}}, port <code>{{.Port}}</code>{{end}}</p>{{end}}</body></html>
`))
