// Package files serves the contents of a sandbox's files over HTTP: GET and POST /files, POST /files/compose. There is no
// limit to the size of a file or the time of a transfer but the disk's and that it goes on. A file is replaced when all of its
// content is there; until then, and when the transfer fails, there is the one before.
package files

import (
	"compress/gzip"
	"errors"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/auth"
	"github.com/cubesandbox/cube/guest-agent/envd/owned"
	"github.com/cubesandbox/cube/guest-agent/envd/settings"
	"github.com/cubesandbox/cube/guest-agent/envd/status"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// Handler serves the files.
type Handler struct {
	Settings *settings.Store
	Journal  owned.Journal
}

// Register adds the handler's routes.
func (h *Handler) Register(mux *http.ServeMux) {
	mux.HandleFunc("GET /files", h.get)
	mux.HandleFunc("POST /files", h.post)
	mux.HandleFunc("POST /files/compose", h.compose)
}

// caller checks that the request may do it, and says as whom. A signature is for the user in the address alone: who has nothing
// else can't name another one, in whose home the path is another file.
func (h *Handler) caller(w http.ResponseWriter, r *http.Request, query url.Values, op auth.Operation) (users.User, error) {
	token := h.Settings.Token()
	if err := auth.Files(r, query, op, token, time.Now()); err != nil {
		auth.Hurry(w)
		return users.User{}, err
	}
	if name := query.Get("username"); name != "" || !auth.Allowed(r, token) {
		return h.Settings.Named(name)
	}
	return h.Settings.Caller(r.Header)
}

// resolve is what a path means to a user. An empty one is none.
func (h *Handler) resolve(u users.User, path, what string) (string, error) {
	if path == "" {
		return "", errdefs.ErrInvalidArgument.WithMessage(what + " is empty")
	}
	return u.Resolve(path, "")
}

func (h *Handler) get(w http.ResponseWriter, r *http.Request) {
	if err := h.download(w, r); err != nil {
		status.Write(w, err)
	}
}

// download sends a file. The error is returned as long as nothing was sent.
func (h *Handler) download(w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	u, err := h.caller(w, r, query, auth.Read)
	if err != nil {
		return err
	}
	path, err := h.resolve(u, query.Get("path"), "path")
	if err != nil {
		return err
	}
	f, info, err := open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	how := negotiate(r.Header)
	if how == unacceptable {
		status.WriteCode(w, http.StatusNotAcceptable, "a file is sent as it is (identity) or, in whole, as gzip; Accept-Encoding excludes both")
		return nil
	}
	header := w.Header()
	header.Set("Content-Disposition", disposition(filepath.Base(path)))
	header.Set("Content-Type", contentType(path))
	header.Add("Vary", "Accept-Encoding")
	a := newAnswer(w)
	defer a.done()
	switch {
	case how == compressed:
		return sendCompressed(a, r, patient{f, stall}, info)
	case info.Mode().IsRegular() && info.Size() > 0 && sized(f):
		http.ServeContent(a, r, "", info.ModTime(), f)
		return nil
	}
	return sendUnsized(a, r, patient{f, stall}, info)
}

// open opens what has content.
func open(path string) (*os.File, fs.FileInfo, error) {
	// A pipe that nobody writes to has none, and doesn't hold this up.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if errors.Is(err, unix.ENOTDIR) { // a file has nothing below it
		err = errdefs.ErrNotFound.WithMessage(err.Error())
	}
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && info.IsDir() {
		err = errdefs.ErrInvalidArgument.WithMessage(path + " is a directory")
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// made are the file systems whose files are made as they are read: the size that they tell is no size.
var made = map[int64]bool{
	unix.PROC_SUPER_MAGIC: true, unix.SYSFS_MAGIC: true, unix.DEBUGFS_MAGIC: true, unix.TRACEFS_MAGIC: true, unix.SECURITYFS_MAGIC: true,
}

// sized says whether the file has as many bytes as it says.
func sized(f *os.File) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(int(f.Fd()), &st) != nil || !made[st.Type]
}

// disposition has a browser show the file, and save it under its name.
func disposition(name string) string {
	if d := mime.FormatMediaType("inline", map[string]string{"filename": name}); d != "" {
		return d
	}
	return "inline"
}

func contentType(path string) string {
	if t := mime.TypeByExtension(filepath.Ext(path)); t != "" {
		return t
	}
	return "application/octet-stream"
}

// sendUnsized sends what doesn't say how much it is, as files of /proc: until its end.
func sendUnsized(w http.ResponseWriter, r *http.Request, f io.Reader, info fs.FileInfo) error {
	first := make([]byte, 32<<10)
	n, err := f.Read(first)
	if err != nil && err != io.EOF {
		return err
	}
	setModified(w, info)
	if n == 0 {
		w.Header().Set("Content-Length", "0")
	}
	w.WriteHeader(http.StatusOK)
	if n == 0 || r.Method == http.MethodHead {
		return nil
	}
	if _, err := w.Write(first[:n]); err != nil {
		return nil
	}
	if _, err := io.Copy(w, f); err != nil {
		breakOff()
	}
	return nil
}

func sendCompressed(w http.ResponseWriter, r *http.Request, f io.Reader, info fs.FileInfo) error {
	setModified(w, info)
	w.Header().Set("Content-Encoding", "gzip")
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return nil
	}
	z, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err != nil {
		return err
	}
	if _, err := io.Copy(z, f); err != nil {
		breakOff()
	}
	if err := z.Close(); err != nil {
		breakOff()
	}
	return nil
}

func setModified(w http.ResponseWriter, info fs.FileInfo) {
	w.Header().Set("Last-Modified", info.ModTime().UTC().Format(http.TimeFormat))
}

// breakOff ends the connection, so that the client doesn't take a part of a file for all of it.
func breakOff() { panic(http.ErrAbortHandler) }
