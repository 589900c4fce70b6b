package files

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/auth"
	"github.com/cubesandbox/cube/guest-agent/envd/metadata"
	"github.com/cubesandbox/cube/guest-agent/envd/owned"
	"github.com/cubesandbox/cube/guest-agent/envd/status"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// maxFiles bounds the files of a form, of which the answer tells.
const maxFiles = 10_000

const (
	// maxCompose bounds a request to compose a file: its sources' paths.
	maxCompose = 8 << 20
	// composePiece is how much is copied before it is looked whether the client is still there.
	composePiece = 64 << 20
)

// written is what is told of a file that was written.
type written struct {
	Name     string            `json:"name"`
	Path     string            `json:"path"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// upload is one request.
type upload struct {
	h    *Handler
	user users.User
	meta map[string]string
	done []written
}

func (h *Handler) post(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	u, err := h.caller(w, r, query, auth.Write)
	if err != nil {
		status.Write(w, err)
		return
	}
	b := newBody(w, r)
	defer b.done()
	up := &upload{h: h, user: u}
	if up.meta, err = metadata.FromHeader(r.Header); err == nil {
		err = up.receive(r.Header, query.Get("path"), b)
	}
	if err != nil {
		// A client that is still sending looks for no answer.
		_, _ = io.Copy(io.Discard, b)
		status.Write(w, owned.Full(err))
		return
	}
	status.WriteJSON(w, http.StatusOK, up.done)
}

// receive writes what the request has. A file of several is written even where a later one fails.
func (up *upload) receive(h http.Header, path string, in io.Reader) error {
	switch coding := strings.ToLower(h.Get("Content-Encoding")); coding {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(in)
		if err != nil {
			return broken(err)
		}
		in = z
	default:
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("Content-Encoding %q is neither gzip nor identity", coding))
	}
	kind, parameters, err := mime.ParseMediaType(h.Get("Content-Type"))
	switch {
	case err == nil && kind == "application/octet-stream":
		return up.write(path, "path", in)
	case err == nil && kind == "multipart/form-data" && parameters["boundary"] != "":
		return up.form(path, multipart.NewReader(in, parameters["boundary"]))
	}
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("Content-Type %q is neither multipart/form-data nor application/octet-stream", h.Get("Content-Type")))
}

// form writes the parts that are called "file": one to the path or, where there is none, each to its own file name.
func (up *upload) form(path string, parts *multipart.Reader) error {
	for {
		part, err := parts.NextPart()
		if err == io.EOF {
			break
		}
		if err != nil {
			return broken(err)
		}
		if part.FormName() != "file" {
			continue
		}
		to, what := path, "path"
		if path == "" {
			to, what = fileName(part), "a part's file name"
		} else if len(up.done) > 0 {
			return errdefs.ErrInvalidArgument.WithMessage("path is for one file; the form has more")
		}
		if len(up.done) == maxFiles {
			return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("the form has more than %d files", maxFiles))
		}
		if err := up.write(to, what, part); err != nil {
			return err
		}
	}
	if len(up.done) == 0 {
		return errdefs.ErrInvalidArgument.WithMessage(`the form has no part "file"`)
	}
	return nil
}

// fileName is a part's with its directories, which multipart.Part leaves out.
func fileName(p *multipart.Part) string {
	_, parameters, err := mime.ParseMediaType(p.Header.Get("Content-Disposition"))
	if err != nil {
		return ""
	}
	return parameters["filename"]
}

// write writes a file, as a whole or not at all.
func (up *upload) write(path, what string, in io.Reader) error {
	return up.create(path, what, func(f *owned.File) error {
		src := &source{Reader: in}
		_, err := io.CopyBuffer(patient{f.File, stall}, src, make([]byte, piece))
		if src.err != nil {
			return broken(src.err)
		}
		return err
	})
}

// create makes a file of what fill writes.
func (up *upload) create(path, what string, fill func(*owned.File) error) error {
	path, err := up.h.resolve(up.user, path, what)
	if err != nil {
		return err
	}
	f, err := up.h.Journal.Create(path, up.user)
	if err != nil {
		return err
	}
	defer f.Abort()
	if err := fill(f); err != nil {
		return err
	}
	if err := f.Commit(up.meta); err != nil {
		return err
	}
	up.done = append(up.done, written{Name: filepath.Base(path), Path: path, Type: "file", Metadata: up.meta})
	return nil
}

// source remembers that it wasn't the file but the request that failed.
type source struct {
	io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

func broken(err error) error {
	return errdefs.ErrInvalidArgument.WithMessage("the request's body can't be read: " + err.Error())
}

// compose makes a file of others, one after the other. They stay.
func (h *Handler) compose(w http.ResponseWriter, r *http.Request) {
	entry, err := h.composed(w, r)
	if err != nil {
		status.Write(w, owned.Full(err))
		return
	}
	status.WriteJSON(w, http.StatusOK, entry)
}

func (h *Handler) composed(w http.ResponseWriter, r *http.Request) (*written, error) {
	var request struct {
		Sources     []string `json:"source_paths"`
		Destination string   `json:"destination"`
		Username    string   `json:"username"`
	}
	b := newBody(w, r)
	defer b.done()
	if err := json.NewDecoder(http.MaxBytesReader(w, io.NopCloser(b), maxCompose)).Decode(&request); err != nil {
		return nil, broken(err)
	}
	u, err := h.Settings.Caller(r.Header)
	if request.Username != "" {
		u, err = h.Settings.Named(request.Username)
	}
	if err != nil {
		return nil, err
	}
	if len(request.Sources) == 0 {
		return nil, errdefs.ErrInvalidArgument.WithMessage("source_paths is empty")
	}
	up := &upload{h: h, user: u}
	if up.meta, err = metadata.FromHeader(r.Header); err != nil {
		return nil, err
	}
	err = up.create(request.Destination, "destination", func(f *owned.File) error {
		for i, source := range request.Sources {
			if err := up.appendTo(r.Context(), f.File, source, i); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &up.done[0], nil
}

func (up *upload) appendTo(ctx context.Context, f *os.File, path string, index int) error {
	what := fmt.Sprintf("source_paths[%d]", index)
	path, err := up.h.resolve(up.user, path, what)
	if err != nil {
		return err
	}
	src, info, err := open(path)
	if err != nil {
		return err
	}
	defer src.Close()
	if !info.Mode().IsRegular() {
		return errdefs.ErrInvalidArgument.WithMessage(what + ": " + path + " is not a file")
	}
	// It is where the file is written in place: a copy would have no end.
	if there, err := f.Stat(); err == nil && os.SameFile(info, there) {
		return errdefs.ErrInvalidArgument.WithMessage(what + ": " + path + " is the destination")
	}
	for ctx.Err() == nil {
		_ = f.SetWriteDeadline(time.Now().Add(stall)) // of a pipe
		_, err := io.CopyN(f, src, composePiece)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}
