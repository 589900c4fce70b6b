package api

import (
	"context"
	"net/http"
	"time"

	"github.com/cubesandbox/cube/internal/control"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// templateTimeout bounds the making of a template: of its machine's boot, its save and the proof.
const templateTimeout = 10 * time.Minute

// OpenTemplates has the service make templates.
func (s *Service) OpenTemplates(b *templates.Builder) { s.builder.Store(b) }

// Template makes a template of an image. A client that goes away gives it up.
func (s *Service) Template(ctx context.Context, r templates.Request) (res templates.Result, err error) {
	b := s.builder.Load()
	if b == nil {
		return res, errNotReady
	}
	err = s.ops.run(ctx, opTemplate, "", templateTimeout, func(ctx context.Context) error {
		res, err = b.Build(ctx, r)
		return err
	})
	return res, err
}

// Template is Service.Template.
func (c *Client) Template(ctx context.Context, r templates.Request) (res templates.Result, err error) {
	err = control.Send(ctx, c.socket, http.MethodPost, Root+"templates", r, &res)
	return res, err
}
