package builds

import (
	"context"
	"crypto/subtle"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// linkTime is how long a client may begin to upload a file after it was told where to.
const linkTime = time.Hour

// link lets whoever has it upload a file.
type link struct {
	template, team, sum string
	until               int64 // seconds since 1970
}

func (l link) signature(e Engine) string {
	return e.SignUpload(fmt.Sprintf("%s %s %s %d", l.template, l.team, l.sum, l.until))
}

func (l link) path(e Engine) string {
	q := url.Values{"team": {l.team}, "expires": {strconv.FormatInt(l.until, 10)}, "signature": {l.signature(e)}}
	return "/templates/" + l.template + "/files/" + l.sum + "?" + q.Encode()
}

// Link is where a client may put a file, for a while: a path with a query.
func (s *Service) Link(ctx context.Context, team string, of db.Ref, sum string) (present bool, path string, err error) {
	if err := s.ready(); err != nil {
		return false, "", err
	}
	if !templates.ValidSum(sum) {
		return false, "", errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("hash: %q isn't 64 hexadecimal digits", sum))
	}
	t, err := s.ownTemplate(ctx, team, of)
	if err != nil {
		return false, "", err
	}
	if err := s.uploads.expect(team); err != nil {
		return false, "", err
	}
	l := link{template: t.ID, team: team, sum: sum, until: time.Now().Add(linkTime).Unix()}
	return s.uploads.Has(team, sum), l.path(s.engine), nil
}

// Upload keeps a file that is uploaded to where Link says: template, sum and query are its. A link that isn't good, or isn't any
// more, is errdefs.ErrPermissionDenied, a template that is no more errdefs.ErrNotFound; otherwise errors are those of Uploads.Put.
func (s *Service) Upload(ctx context.Context, template, sum string, query url.Values, body io.Reader, size int64) error {
	if err := s.ready(); err != nil {
		return err
	}
	l := link{template: template, team: query.Get("team"), sum: sum}
	l.until, _ = strconv.ParseInt(query.Get("expires"), 10, 64) // what isn't a number has no signature
	switch {
	case subtle.ConstantTimeCompare([]byte(query.Get("signature")), []byte(l.signature(s.engine))) != 1:
		return errdefs.ErrPermissionDenied.WithMessage("the link isn't one that this API has given out: GET /templates/TEMPLATE/files/HASH gives one")
	case time.Now().Unix() > l.until:
		return errdefs.ErrPermissionDenied.WithMessage("the link was good until " + time.Unix(l.until, 0).UTC().Format(time.RFC3339) + ": GET /templates/TEMPLATE/files/HASH gives another one")
	}
	if _, err := s.ownTemplate(ctx, l.team, db.Ref{Name: l.template}); err != nil {
		return err
	}
	return s.uploads.Put(ctx, l.team, sum, body, size)
}
