package e2b

import (
	"strings"
	"testing"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// TestOfImage: what isn't a template is an image, if it can't be one.
func TestOfImage(t *testing.T) {
	s, engine := newTestServer(t, nil)
	for asked, want := range map[string][2]string{
		"image:docker.io/library/python:3.12":                 {"", "docker.io/library/python:3.12"},
		"image:localhost:5000/x":                              {"", "localhost:5000/x"},
		"image:127.0.0.1/x@sha256:" + strings.Repeat("0", 64): {"", "127.0.0.1/x@sha256:" + strings.Repeat("0", 64)},
		"image:v1": {"image:v1", ""},
		"image":    {"image", ""},
	} {
		w := ask(s.Handler(), "POST", "/v2/sandboxes", `{"templateID":"`+asked+`"}`)
		if c, ok := engine.last.(lifecycle.Create); !ok || w.Code != 201 || c.Template != want[0] || c.Image != want[1] {
			t.Errorf("%s: %d %s, asked %+v", asked, w.Code, w.Body, engine.last)
		}
	}
}
