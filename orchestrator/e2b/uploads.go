package e2b

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/containerd/errdefs"
)

// uploadTimeout bounds an upload: SDKs wait as long for its end.
const uploadTimeout = time.Hour

// upload takes a file that a client uploads where uploadLink has told it to. It is as large as it is: it isn't read into memory.
func (s *Server) upload(w http.ResponseWriter, r *http.Request) {
	x := w.(*exchange)
	err := s.ready()
	if err == nil {
		ctx, cancel := context.WithTimeout(r.Context(), s.timeout(uploadTimeout))
		defer cancel()
		end, _ := ctx.Deadline()
		body := &patient{r.Body, http.NewResponseController(x), s.timeout(bodyTimeout), end}
		err = s.builds.Upload(ctx, r.PathValue("templateID"), r.PathValue("hash"), r.URL.Query(), body, r.ContentLength)
	}
	if errdefs.IsOutOfRange(err) {
		err = fail(http.StatusRequestEntityTooLarge, "%v", err)
	}
	if err != nil {
		s.refuse(x, r, err)
		return
	}
	s.send(x, http.StatusNoContent, nil)
}

// patient is a body whose client may take its time as long as something comes, but not beyond the end: it takes up room.
type patient struct {
	io.Reader
	control *http.ResponseController
	pause   time.Duration
	end     time.Time
}

func (p *patient) Read(b []byte) (int, error) {
	until := time.Now().Add(p.pause)
	if p.end.Before(until) {
		until = p.end
	}
	_ = p.control.SetReadDeadline(until) // there is none where it isn't known
	return p.Reader.Read(b)
}
